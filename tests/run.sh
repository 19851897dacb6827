#!/bin/bash
# Installs, builds and runs every check on a machine without a GPU; the last line counts them.
#   tests/run.sh [--only=STEP,...] [--jobs=N]
# Steps, in this order:
#   packages    the distribution's packages (deploy/install_packages.sh --tests)
#   python      a virtual environment in build/venv for the tests with Python clients
#   style       clang-format over every file, and the rules of the tree (tests/tidy)
#   release     preset release: all tests
#   clang-tidy  .clang-tidy over engine/ and controller/; needs release's compile_commands.json
#   asan, tsan  presets asan and tsan: unit and property tests under the sanitizers
set -euo pipefail
cd "$(dirname "$0")/.."

all_steps=(packages python style release clang-tidy asan tsan)
steps=("${all_steps[@]}")
jobs=$(nproc)
for argument in "$@"; do
  case "$argument" in
    --only=*) IFS=, read -r -a steps <<<"${argument#*=}" ;;
    --jobs=*)
      jobs=${argument#*=}
      if [[ ! "$jobs" =~ ^[1-9][0-9]{0,3}$ ]]; then
        echo "run.sh: --jobs=$jobs is no number of jobs" >&2
        exit 2
      fi
      ;;
    -h | --help)
      sed -n '2,10s/^# \{0,1\}//p' "$0"
      exit 0
      ;;
    *)
      echo "run.sh: unknown argument '$argument'; see --help" >&2
      exit 2
      ;;
  esac
done
if ((${#steps[@]} == 0)); then
  echo "run.sh: --only names no step; there are: ${all_steps[*]}" >&2
  exit 2
fi
for step in "${steps[@]}"; do
  if [[ " ${all_steps[*]} " != *" $step "* ]]; then
    echo "run.sh: no step '$step'; there are: ${all_steps[*]}" >&2
    exit 2
  fi
done

passed=0
failed=0
skipped=0
failures=()

# check NAME COMMAND...: runs a command that counts as one test.
check() {
  local name=$1 start=$SECONDS
  shift
  echo "== $name"
  if "$@"; then
    passed=$((passed + 1))
    echo "== $name: passed, $((SECONDS - start)) s"
  else
    failed=$((failed + 1))
    failures+=("$name")
    echo "== $name: FAILED, $((SECONDS - start)) s"
    return 1
  fi
}

# The number behind ATTRIBUTE=" of the first element of a JUnit file.
junit_count() {
  sed -n "s/.*[[:space:]]$2=\"\([0-9]*\)\".*/\1/p;" "$1" | head -1
}

# run_ctest PRESET ARGUMENTS...: adds ctest's own count.
run_ctest() {
  local preset=$1 junit="$PWD/build/$1/junit.xml" start=$SECONDS status=0
  shift
  rm -f "$junit"
  echo "== $preset: ctest"
  "${no_aslr[@]}" ctest --test-dir "build/$preset" --no-tests=error --output-on-failure --parallel "$jobs" \
    --output-junit "$junit" "$@" || status=$?
  if [[ ! -s "$junit" ]]; then
    failed=$((failed + 1))
    failures+=("$preset: ctest ended with $status and wrote no report")
    return
  fi
  # The element's attributes stand on lines of their own; those of single tests have other names.
  local tests bad off
  tests=$(junit_count "$junit" tests)
  bad=$(junit_count "$junit" failures)
  off=$(($(junit_count "$junit" skipped) + $(junit_count "$junit" disabled)))
  if ((status != 0 && bad == 0)); then bad=1; fi
  passed=$((passed + tests - bad - off))
  failed=$((failed + bad))
  skipped=$((skipped + off))
  if ((bad > 0)); then
    failures+=("$preset: $bad tests")
    # Once more at the end: the whole log is long.
    failures+=("$(python3 -B tests/support/python/failed_tests.py "$junit" 2>&1)") || true
  fi
  echo "== $preset: ctest: $tests tests, $bad failed, $off skipped, $((SECONDS - start)) s"
}

# Without a GPU the tests that need one are left out; REQUIRE_GPU=1 runs them, and they fail without.
left_out='^(long|gpu)$'
if [[ "${REQUIRE_GPU:-}" == 1 ]]; then left_out='^long$'; fi

launcher=()
if command -v ccache >/dev/null; then launcher=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache); fi

configure_and_build() {
  local preset=$1
  shift
  cmake --preset "$preset" -DWRITESCOPE_WITH_TESTS=ON "${launcher[@]}" "$@" >"build/$preset.configure.log" ||
    { cat "build/$preset.configure.log"; return 1; }
  # Test binaries run once at build time, to be asked for their tests.
  "${no_aslr[@]}" cmake --build --preset "$preset" --parallel "$jobs"
}

# The client tests' Python; nothing is fetched when it has what requirements.txt asks for.
make_python() {
  local requirements=tests/support/python/requirements.txt stamp=build/venv/requirements.txt
  cmp -s "$requirements" "$stamp" && return
  rm -rf build/venv
  python3 -m venv build/venv &&
    build/venv/bin/python -m pip install --quiet --disable-pip-version-check -r "$requirements" &&
    cp "$requirements" "$stamp"
}

check_format() {
  local clang_format version
  clang_format=$(command -v clang-format-14) || { echo "clang-format-14 is not installed"; return 1; }
  version=$("$clang_format" --version)
  [[ "$version" == *"version 14."* ]] || { echo "$clang_format is '$version', not 14"; return 1; }
  find engine server controller tests \( -name '*.h' -o -name '*.cc' \) -print0 |
    xargs -0 "$clang_format" --dry-run --Werror
}

sanitizer_step() {
  local preset=$1
  shift
  check "$preset: build" configure_and_build "$preset" || return 0
  run_ctest "$preset" --label-regex '^(unit|property)$' "$@"
}

run_step() {
  no_aslr=()
  case "$1" in
    packages) check "packages" deploy/install_packages.sh --tests || finish ;;
    python) check "python environment" make_python || true ;;
    style)
      check "clang-format" check_format || true
      check "rules of the tree" python3 -B tests/tidy/tidy_test.py || true
      check "names in texts" python3 -B tests/tidy/names_test.py || true
      check "arguments of scripts" python3 -B tests/tidy/scripts_test.py || true
      ;;
    release)
      if check "release: build" configure_and_build release; then run_ctest release --label-exclude "$left_out"; fi
      ;;
    clang-tidy)
      check "clang-tidy" python3 -B tests/tidy/run_clang_tidy.py --build=build/release \
        --cache=build/tidy-cache --jobs="$jobs" engine controller || true
      ;;
    asan)
      export ASAN_OPTIONS=strict_string_checks=1:detect_stack_use_after_return=1
      export UBSAN_OPTIONS=print_stacktrace=1
      sanitizer_step asan
      ;;
    tsan)
      # g++ 12's thread sanitizer cannot place its shadow on kernels that randomise 32 bits.
      if setarch -R true 2>/dev/null; then no_aslr=(setarch -R); fi
      export TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1
      sanitizer_step tsan
      ;;
  esac
}

finish() {
  echo
  echo "tests/run.sh took $SECONDS s"
  for failure in "${failures[@]}"; do echo "FAILED: $failure"; done
  if ((skipped)); then
    echo "$passed passed, $failed failed, $skipped skipped"
  else
    echo "$passed passed, $failed failed"
  fi
  ((failed == 0 && passed > 0))
  exit
}

mkdir -p build
for step in "${steps[@]}"; do run_step "$step"; done
finish
