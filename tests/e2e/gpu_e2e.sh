#!/bin/bash
# End to end on a GPU: worker, controller and client of one folder of programs (a bundle, or a build's
# bin/), over gRPC. Facts planted in a spilled prompt are asked for at shares 0, 0.5 and 1; then a
# shape of Qwen3-30B-A3B with random weights reads and continues a long prompt.
#   tests/e2e/gpu_e2e.sh BIN_DIR [LONG_TOKENS]
set -euo pipefail
cd "$(dirname "$0")/../.."
if [[ "${1:-}" == --help || "${1:-}" == -h ]]; then
  sed -n '2,5s/^# \{0,1\}//p' "$0"
  exit 0
fi
long_tokens=${2:-32768}
if [[ ! -x "${1:-}/writescope-worker" || ! "$long_tokens" =~ ^[1-9][0-9]*$ ]]; then
  echo "gpu_e2e.sh: '$*' is no folder of programs, with a number of tokens if any; see --help" >&2
  exit 2
fi
bin_dir=$(realpath "$1")
export PATH="$bin_dir:$PATH"
run_dir=$(mktemp -d)
pids=()
trap 'kill "${pids[@]}" 2>/dev/null || true; wait 2>/dev/null || true; rm -rf "$run_dir"' EXIT

fail() {
  echo "gpu_e2e.sh FAILED: $*" >&2
  tail -n 20 "$run_dir"/*.log >&2
  exit 1
}

# start_worker NAME FLAGS...: sets WRITESCOPE_ADDRESS and WRITESCOPE_CONTROL_ADDRESS.
start_worker() {
  local log="$run_dir/$1.log"
  shift
  writescope-worker "$@" --listen=127.0.0.1:0 --control-listen=127.0.0.1:0 --metrics-listen=127.0.0.1:0 \
    >"$log" 2>&1 &
  worker_pid=$!
  pids+=("$worker_pid")
  for _ in {1..1200}; do
    if grep -q '^READY' "$log"; then break; fi
    kill -0 $worker_pid 2>/dev/null || fail "the worker ended"
    sleep 0.1
  done
  local line
  line=$(grep '^LISTENING ' "$log")
  [[ "$line" =~ generation=([^ ]+)\ control=([^ ]+)\ metrics=([^ ]+) ]]
  export WRITESCOPE_ADDRESS=${BASH_REMATCH[1]} WRITESCOPE_CONTROL_ADDRESS=${BASH_REMATCH[2]}
}
stop_worker() {
  kill -TERM $worker_pid
  wait $worker_pid || fail "the worker ended with $?"
}

echo "== demo checkpoint: facts in a prompt that lies outside the device"
start_worker demo --model=deploy/demo-model --device=cuda --vram-budget=1120MiB --host-budget=512MiB \
  --ring-size=4MiB --prefill-chunk=512 --max-sequences=2
sed -n '/memory:/,/^KV cache/p' "$run_dir/demo.log"
writescope-controller --worker="$WRITESCOPE_CONTROL_ADDRESS" --metrics-listen=127.0.0.1:0 --shadow \
  >"$run_dir/controller.log" 2>&1 &
pids+=($!)
code=$((10000 + RANDOM % 90000))
# The fact stands between two sentences, a tenth of the way into the prose.
awk -v code="$code" 'BEGIN { RS = "\001" } {
    while (length(text) < 60000) text = text $0
    text = substr(text, 1, 60000)
    at = 6000 + index(substr(text, 6001), ". ") + 1
    print substr(text, 1, at) "The harbor code of Lima is " code ". " substr(text, at + 1)
    printf "\nQuestion: What is the harbor code of Lima?\nAnswer: The harbor code of Lima is "
  }' deploy/demo-model/prose.txt >"$run_dir/question.txt"
for share in 0 0.5 1; do
  writescope share set "$share" --for=5m >/dev/null
  writescope generate --file="$run_dir/question.txt" --temperature=0 --max-tokens=12 --report \
    >"$run_dir/answer.txt" 2>"$run_dir/report.txt" || fail "no answer at share $share"
  [[ "$(tr -d ' \n' <"$run_dir/answer.txt")" == "$code"* ]] ||
    fail "at share $share the code $code was '$(cat "$run_dir/answer.txt")'"
  spilled=$(sed -n 's/.*; spilled \([0-9]*\)%$/\1/p' "$run_dir/report.txt")
  ((spilled >= 50)) || fail "only $spilled % of the KV was outside the device"
  echo "share $share: $code recalled, $spilled % spilled"
  cat "$run_dir/report.txt"
done
writescope status
stop_worker

echo "== shape of Qwen3-30B-A3B, int4, random weights: $long_tokens tokens"
start_worker qwen3 --model=deploy/model-shapes/qwen3-30b-a3b --load-format=dummy --weights=int4 \
  --device=cuda --vram-budget=19GiB --host-budget=12GiB --max-sequences=2
sed -n '/memory:/,/^KV cache/p' "$run_dir/qwen3.log"
seq -s ' ' 1 "$long_tokens" >"$run_dir/ids.txt"
start=$SECONDS
writescope generate --token-ids --file="$run_dir/ids.txt" --temperature=0 --ignore-eos --max-tokens=64 --report \
  >"$run_dir/ids_out.txt" 2>"$run_dir/report.txt" || fail "no answer to the long prompt"
[[ $(wc -w <"$run_dir/ids_out.txt") -eq 64 ]] || fail "$(wc -w <"$run_dir/ids_out.txt") tokens of 64"
cat "$run_dir/report.txt"
echo "$((SECONDS - start)) s"
writescope status
awk '/VmRSS|VmHWM/' /proc/$worker_pid/status
stop_worker
echo "all as expected"
