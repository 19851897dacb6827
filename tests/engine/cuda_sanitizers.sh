#!/bin/bash
# memcheck and racecheck over the GPU's kernels, in the smallest tests that launch each of them. Needs
# a GPU and compute-sanitizer; a test takes some seconds under memcheck and up to minutes under
# racecheck. Prints a line for each test, and fails where a tool has found something.
#   tests/engine/cuda_sanitizers.sh BUILD_DIR [TOOL...]
# LIMIT=SECONDS is for each test: one that does not end in it is said to be unknown, and is no failure.
# JOBS=N runs as many at once.
set -uo pipefail
build_dir=$1
shift
tools=("$@")
((${#tools[@]} > 0)) || tools=(memcheck racecheck)
limit=${LIMIT:-300}
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT

# Program, then the tests.
runs=(
  "cuda_latent_heads_test *ALostToken*:*WarmsUp*"
  "cuda_attend_test *WarmUp*"
  "cuda_attend_test *RowsThatSeeNothing*"
  "cuda_ops_test *CudaStagedTest.Attention*/bf16"
  "cuda_ops_test *CudaStagedTest.WhatWasRecorded*/bf16"
  "cuda_ops_test *CudaStagedTest.Queries*/bf16"
  "cuda_ops_test *CudaFusedTest.*/bf16"
  "cuda_ops_test *CudaOpsTest.*/bf16"
  "cuda_ops_test *CudaSmallProduct.*"
  "cuda_ops_test *CudaMoeTest.MatchesTheTwin/bf16Int4"
  "cuda_ops_test *CudaMoeTest.MatchesTheTwin/bf16Source"
  "runtime_model_runner_test *ResidentSteps*/qwen3_moe"
  "runtime_model_runner_test *SpilledSteps*/deepseek_v2_plain"
)

# check TOOL RUN OUT: its line goes to OUT, and OUT.failed is made where something was found.
check() {
  local tool=$1 run=$2 out=$3 code program start=$SECONDS summary tests
  program=$(find "$build_dir" -name "${run%% *}" -type f | head -n 1)
  timeout -k 5 "$limit" compute-sanitizer --tool="$tool" --error-exitcode=9 "$program" \
    --gtest_filter="${run#* }" >"$out.log" 2>&1
  code=$?
  summary=$(grep -E 'SUMMARY' "$out.log" | sed 's/^=* *//' | paste -sd ' ')
  tests=$(grep -cE '^\[ +OK \]' "$out.log")
  if ((code == 124)); then
    summary="unknown: not done in $limit s"
  elif ((code != 0)); then
    summary="${summary:-no summary}; exit code $code"
    touch "$out.failed"
  elif ((tests == 0)); then
    summary="no test ran"
    touch "$out.failed"
  fi
  echo "$tool ${run#* } of ${run%% *}: $tests tests in $((SECONDS - start)) s; $summary" >"$out"
  [[ ! -e "$out.failed" ]] ||
    grep -E 'Error|Race|Warning|=========     at|FAILED' "$out.log" | head -n 12 >>"$out"
}

export WRITESCOPE_TEST_DEVICE=cuda WRITESCOPE_TEST_COMPUTE=bf16
number=100
for tool in "${tools[@]}"; do
  for run in "${runs[@]}"; do
    while (($(jobs -rp | wc -l) >= ${JOBS:-1})); do wait -n; done
    check "$tool" "$run" "$dir/$((++number))" &
  done
done
wait
cat "$dir"/[0-9][0-9][0-9]
[[ -z "$(find "$dir" -name '*.failed')" ]]
