#!/bin/bash
# Every test that needs a GPU, one after the other: their budgets count what other programs hold of its
# memory. A test that finds no GPU fails.
#   tests/gpu.sh BUILD_DIR [STEP...]
# Steps: kernels, models, recall (minutes), e2e, sanitizers (needs compute-sanitizer); all but that with
# none named. Each step says what fails, and goes on.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
if [[ "${1:-}" == --help || "${1:-}" == -h ]]; then
  sed -n '2,6s/^# \{0,1\}//p' "$0"
  exit 0
fi
if [[ ! -d "${1:-}/tests" ]]; then
  echo "gpu.sh: '${1:-}' is no folder that tests were built in; see --help" >&2
  exit 2
fi
build_dir=$(realpath "$1")
shift
steps=("$@")
((${#steps[@]} > 0)) || steps=(kernels models recall e2e)
for step in "${steps[@]}"; do
  if [[ " kernels models recall e2e sanitizers " != *" $step "* ]]; then
    echo "gpu.sh: no step '$step'; there are: kernels, models, recall, e2e, sanitizers" >&2
    exit 2
  fi
done
export REQUIRE_GPU=1
failures=()

run() {
  echo "== $*"
  "$@" || failures+=("$*")
}

# on_gpu COMPUTE TEST [ARGUMENT...]: a test of whole models, which without this runs on the CPU device.
on_gpu() {
  run env WRITESCOPE_TEST_DEVICE=cuda WRITESCOPE_TEST_COMPUTE="$1" "$build_dir/tests/engine/runtime/runtime_$2_test" \
    --gtest_brief=1 "${@:3}"
}

for step in "${steps[@]}"; do
  case "$step" in
    kernels) run ctest --test-dir "$build_dir" --label-regex '^gpu$' --no-tests=error --output-on-failure ;;
    models)
      for compute in f32 bf16; do
        for name in golden failed_step model_runner micro_batches; do on_gpu $compute $name; done
      done
      WRITESCOPE_TEST_SIMT=1 on_gpu f32 golden # As GPUs before sm_80 have it
      for name in latent_prompt auto_micro_batches int4_accuracy; do on_gpu bf16 $name; done
      ;;
    recall)
      on_gpu f32 recall '--gtest_filter=*/8192'
      on_gpu bf16 recall '--gtest_filter=*/32640:RecallInt4Test.*'
      ;;
    e2e) run tests/e2e/gpu_e2e.sh "$build_dir/bin" ;;
    sanitizers) run tests/engine/cuda_sanitizers.sh "$build_dir" ;;
  esac
done
if ((${#failures[@]} > 0)); then
  printf 'FAILED: %s\n' "${failures[@]}"
  exit 1
fi
echo "all as expected"
