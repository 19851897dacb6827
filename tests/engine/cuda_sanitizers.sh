#!/bin/bash
# memcheck and racecheck over the GPU's kernels, in the smallest tests that launch each of them. Needs
# a GPU and compute-sanitizer; a test takes some seconds under memcheck and up to minutes under
# racecheck. Prints a line for each test, and fails where a tool has found something.
#   tests/engine/cuda_sanitizers.sh BUILD_DIR [TOOL...]
# LIMIT=SECONDS is for each test: one that does not end in it is said to be unknown, and is no failure.
# One after the other: the tests' budgets count what other programs hold of the GPU's memory.
set -uo pipefail
build_dir=$1
shift
tools=("$@")
((${#tools[@]} > 0)) || tools=(memcheck racecheck)
limit=${LIMIT:-300}
log=$(mktemp)
trap 'rm -f "$log"' EXIT

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

# check TOOL RUN: prints its line; fails where something was found.
check() {
  local tool=$1 run=$2 code=0 program start=$SECONDS summary tests
  program=$(find "$build_dir" -name "${run%% *}" -type f | head -n 1)
  timeout -k 5 "$limit" compute-sanitizer --tool="$tool" --error-exitcode=9 "$program" \
    --gtest_filter="${run#* }" >"$log" 2>&1 || code=$?
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
  echo "$tool ${run#* } of ${run%% *}: $tests tests in $((SECONDS - start)) s; $summary"
  ((code == 0 || code == 124)) && return 0
  grep -E 'Error|Race|Warning|=========     at|FAILED' "$log" | head -n 12
  return 1
}

export WRITESCOPE_TEST_DEVICE=cuda WRITESCOPE_TEST_COMPUTE=bf16
failed=0
for tool in "${tools[@]}"; do
  for run in "${runs[@]}"; do
    check "$tool" "$run" || failed=1
  done
done
exit $failed
