#!/bin/bash
# memcheck and racecheck over every kernel of the engine, in small cases of the tests that launch
# them. Needs a GPU. Prints a line for each test program, and what a tool has found; fails where it
# has found something, and where a kernel was not launched under it.
#   tests/engine/cuda_sanitizers.sh BUILD_DIR [TOOL...]
# COMPUTE_SANITIZER=PATH takes another tool than the toolkit's, LOGS=DIR keeps what is written.
# LIMIT=SECONDS is for each program: one that does not end in it is said to be unknown, and fails too.
# On an H200 memcheck takes some 45 s, racecheck some five minutes, of which whole models take three.
# One after the other: the tests' budgets count what other programs hold of the GPU's memory.
set -uo pipefail
if [[ "${1:-}" == --help || "${1:-}" == -h ]]; then
  sed -n '2,9s/^# \{0,1\}//p' "$0"
  exit 0
fi
if [[ ! -d "${1:-}/tests" ]]; then
  echo "cuda_sanitizers.sh: '${1:-}' is no folder that tests were built in; see --help" >&2
  exit 2
fi
build_dir=$1
shift
tools=("$@")
((${#tools[@]} > 0)) || tools=(memcheck racecheck)
sanitizer=${COMPUTE_SANITIZER:-compute-sanitizer}
if ! command -v "$sanitizer" >/dev/null; then
  echo "cuda_sanitizers.sh: there is no $sanitizer" >&2
  exit 2
fi
limit=${LIMIT:-600}
work=${LOGS:-$(mktemp -d)}
[[ -n "${LOGS:-}" ]] || trap 'rm -rf "$work"' EXIT

# Program, then its tests; none that warms up, since that launches kernels without any work. Whole
# models come last: the same kernels one behind the other, begun early, and replayed.
runs=(
  "cuda_device_test *Flag*"
  "cuda_attend_test *Matches*:*ManySpans*:*Float32Keys*:*RowsThatSeeNothing*:CudaMergeTest.*"
  "cuda_latent_heads_test *ForAnyCut"
  "cuda_ops_test CudaMlp.*:CudaQuantize.*:*CudaMoeTest.MatchesTheTwin/*:-*/bf16Int4"
  "cuda_ops_test CudaSmallProduct.*:CudaExpertRing.*:CudaRouteFew.*:*CudaMoeTest.MatchesTheTwin/bf16Int4"
  "cuda_ops_test *CudaOpsTest.*:*CudaFusedTest.*:-*WarmsUp*"
  "cuda_ops_test *CudaStagedTest.AttentionIs*:*CudaStagedTest.WhatWasRecorded*:*CudaStagedTest.Queries*"
  "runtime_model_runner_test *ResidentSteps*/qwen3_moe:*SpilledSteps*/deepseek_v2_plain"
)
# Kernels that a GPU of another kind takes.
elsewhere=(
  "AttendPrefillKernel<128, 128>"  # Where there are no products of warpgroups
  "RouteFewKernel<1, 4, false>"    # Nor clusters of thread blocks
  "RouteFewKernel<2, 4, false>"
  "MaxOfRowsKernel<float, false, false>"
  "MaxOfRowsKernel<float, true, false>"
  "MaxOfRowsKernel<__nv_bfloat16, false, false>"
  "MaxOfRowsKernel<__nv_bfloat16, true, false>"
)

# check TOOL RUN: prints its line; fails where something was found.
check() {
  local tool=$1 run=$2 code=0 start=$SECONDS log program summary tests
  log=$(mktemp "$work/$tool.XXXX.log")
  program=$(find "$build_dir" -name "${run%% *}" -type f | head -n 1)
  # cuBLAS's kernels are not ours to mend: what they do with shared memory is left out.
  local flags=(--tool="$tool" --error-exitcode=9)
  [[ "$tool" != racecheck ]] || flags+=(--kernel-name kns=writescope)
  timeout -k 5 "$limit" "$sanitizer" "${flags[@]}" "$program" --gtest_filter="${run#* }" >"$log" 2>&1 || code=$?
  summary=$(grep -E 'SUMMARY' "$log" | sed 's/^=* *//' | paste -sd ' ')
  tests=$(grep -cE '^\[ +OK \]' "$log")
  if ((code == 124)); then
    summary="unknown: not done in $limit s"
  elif ((code != 0)); then
    summary="${summary:-no summary}; exit code $code"
  elif ((tests == 0)); then
    summary="no test ran"
    code=1
  fi
  echo "$tool ${run%% *} ${run#* }: $tests tests in $((SECONDS - start)) s; $summary"
  ((code != 0)) || return 0
  grep -vE '^\[ +(RUN|OK) +\]|^TEST_SEED|Host Frame|^\[---|the GPU is serialised' "$log" | head -n 60
  return 1
}

# Kernels that the test programs hold, but for those that a run has launched.
not_launched() {
  sort -u "$1" >"$1.sorted"
  comm -23 <(sed -n 's/^[a-z]* //p' "$1.sorted" | sort -u) \
    <({ sed -n 's/^launched //p' "$1.sorted"; printf '%s\n' "${elsewhere[@]}"; } | sort -u)
}

export WRITESCOPE_TEST_DEVICE=cuda WRITESCOPE_TEST_COMPUTE=bf16 WRITESCOPE_TEST_SIZES=small REQUIRE_GPU=1
failed=0
for tool in "${tools[@]}"; do
  export WRITESCOPE_KERNELS="$work/kernels_$tool"
  : >"$WRITESCOPE_KERNELS"
  for run in "${runs[@]}"; do
    check "$tool" "$run" || failed=1
  done
  missing=$(not_launched "$WRITESCOPE_KERNELS")
  echo "$tool: $(sort -u "$WRITESCOPE_KERNELS" | grep -c '^launched ') kernels launched"
  if [[ -n "$missing" ]]; then
    printf '%s: not launched: %s\n' "$tool" "$missing"
    failed=1
  fi
done
exit $failed
