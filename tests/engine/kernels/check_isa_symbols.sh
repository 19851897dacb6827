#!/bin/sh
# The object files that are built for a newer processor must share no function with others: of two weak
# copies the linker keeps either, and an older processor would meet the newer one's instructions.
# Usage: check_isa_symbols.sh NM ARCHIVE
set -eu
if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
  sed -n '2,4s/^# \{0,1\}//p' "$0"
  exit 0
fi
if [ $# -ne 2 ] || [ ! -f "$2" ]; then
  echo "check_isa_symbols.sh: '$*' are no nm and archive; see --help" >&2
  exit 2
fi
found=0
for member in attention_partial_amx attention_partial_avx2 attention_partial_avx512 \
    attention_partial_avx512bf16 gemm_small_avx2 gemm_small_avx512; do
  symbols=$("$1" --defined-only "$2" | sed -n "/^$member\./,/^\$/p")
  case "$symbols" in
    *" T "*) ;;
    *) echo "$member defines no function: is it still in $2?"; exit 1 ;;
  esac
  weak=$(echo "$symbols" | grep -E ' [WVu] ' | grep -v DW.ref || true)
  if [ -n "$weak" ]; then
    echo "$member shares:"; echo "$weak"; found=1
  fi
done
exit $found
