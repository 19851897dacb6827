#!/bin/bash
# From a fresh Debian 12 or Ubuntu 24.04 to an answer, on a machine without a GPU: builds WriteScope,
# serves the demo checkpoint with a device budget too small for the KV cache, asks for facts planted
# thousands of tokens back, and shows who attended to what.
#   deploy/quickstart.sh [--keep] [--fact=CITY=CODE] [--seed=N] [--tokens=N] [--no-install]
#   --keep            leaves worker and controller running and prints how to call them
#   --fact=CITY=CODE  the fact to plant and ask for, as in --fact=Lima=40718; random by default
#   --seed=N          the same random facts as the run that printed this seed
#   --tokens=N        about how long the prompt is; default 16000, in [8000, 32000]
#   --no-install      installs no packages
set -euo pipefail
cd "$(dirname "$0")/.."

keep=0
fact=""
seed=$RANDOM
tokens=16000
install=1
for argument in "$@"; do
  case "$argument" in
    --keep) keep=1 ;;
    --fact=*) fact=${argument#*=} ;;
    --seed=*) seed=${argument#*=} ;;
    --tokens=*) tokens=${argument#*=} ;;
    --no-install) install=0 ;;
    -h | --help)
      sed -n '2,10s/^# \{0,1\}//p' "$0"
      exit 0
      ;;
    *)
      echo "quickstart.sh: unknown argument '$argument'; see --help" >&2
      exit 2
      ;;
  esac
done
if [[ -n "$fact" && ! "$fact" =~ ^[A-Z][a-z]+=[0-9]{5}$ ]]; then
  echo "quickstart.sh: --fact=$fact is not CITY=CODE with five digits, as in --fact=Lima=40718" >&2
  exit 2
fi
if [[ ! "$seed" =~ ^(0|[1-9][0-9]{0,8})$ || ! "$tokens" =~ ^[1-9][0-9]{3,4}$ ]] || ((tokens < 8000 || tokens > 32000)); then
  echo "quickstart.sh: --seed is a number of at most nine digits, --tokens one in [8000, 32000], both without leading zeros" >&2
  exit 2
fi

model=deploy/demo-model
build=build/release
run_dir=$(mktemp -d "${TMPDIR:-/tmp}/writescope-quickstart.XXXXXX")
worker_pid=""
controller_pid=""

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }

fail() {
  echo >&2
  echo "quickstart.sh FAILED: $*" >&2
  for log in worker controller; do
    if [[ -s "$run_dir/$log.log" ]]; then
      echo "-- the end of the $log's output:" >&2
      tail -n 15 "$run_dir/$log.log" >&2
    fi
  done
  exit 1
}

# Ends a child: politely, then for good.
stop() {
  local pid=$1
  kill -TERM "$pid" 2>/dev/null || return 0
  for _ in {1..100}; do
    kill -0 "$pid" 2>/dev/null || return 0
    sleep 0.1
  done
  kill -KILL "$pid" 2>/dev/null || true
}

clean_up() {
  local status=$?
  trap - EXIT INT TERM
  if ((keep == 0 || status != 0)); then
    if [[ -n "$controller_pid" ]]; then stop "$controller_pid"; fi
    if [[ -n "$worker_pid" ]]; then stop "$worker_pid"; fi
    rm -rf "$run_dir"
  fi
  exit "$status"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# await_line LOG PID PATTERN SECONDS: prints the first line of a log with the pattern.
await_line() {
  local log=$1 pid=$2 pattern=$3 tries=$(($4 * 10))
  for ((i = 0; i < tries; ++i)); do
    if grep -m1 -E "$pattern" "$log" 2>/dev/null; then return 0; fi
    kill -0 "$pid" 2>/dev/null || return 1
    sleep 0.1
  done
  return 1
}

# The worker's /metrics. Bash's own TCP: a fresh machine may have no curl.
metrics() {
  exec 3<>"/dev/tcp/${worker_metrics%:*}/${worker_metrics##*:}"
  printf 'GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n' >&3
  cat <&3
  exec 3<&-
}

# metric NAME [LABEL="VALUE"]: sums its series with this label; reads metrics on stdin.
metric() {
  awk -v name="writescope_$1" -v label="${2:-}" '
    { key = $1; sub(/\{.*/, "", key) }
    key == name && (label == "" || index($0, label)) { sum += $NF; found = 1 }
    END { if (!found) exit 1; printf "%.6f", sum }'
}

is_true() { awk "BEGIN { exit !($1) }"; }
percent() { awk "BEGIN { printf \"%.0f %%\", 100 * ($1) }"; }

# --- Packages and build ---

if ((install)); then
  say "1. Packages"
  deploy/install_packages.sh
fi

say "2. Build (the first takes some minutes; later ones have nothing to do)"
if [[ ! -f "$build/build.ninja" ]]; then
  launcher=()
  if command -v ccache >/dev/null; then launcher=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache); fi
  mkdir -p build
  cmake --preset release -DWRITESCOPE_WITH_TESTS=OFF "${launcher[@]}" >build/configure.log ||
    { cat build/configure.log >&2; fail "cmake found something missing"; }
fi
cmake --build --preset release --target writescope-worker writescope-controller writescope \
  --parallel "$(nproc)" || fail "the build ended with an error"
export PATH="$PWD/$build/bin:$PATH"

# --- The prompt ---

# Four facts about harbours that the checkpoint knows: the one to ask for lies near the front.
RANDOM=$((seed % 32768))
mapfile -t cities < <(sed -n '/^names = """/,/"""/p' "$model/train.py" | sed 's/names = """//; s/""".*//' |
  tr ' ' '\n' | grep .)
facts=()
while ((${#facts[@]} < 4)); do
  city=${cities[RANDOM % ${#cities[@]}]}
  code=$(printf '%05d' $(((RANDOM * 32768 + RANDOM) % 100000)))
  if ((${#facts[@]} == 0)) && [[ -n "$fact" ]]; then
    city=${fact%=*}
    code=${fact#*=}
  fi
  if [[ " ${facts[*]} " != *" $city="* ]]; then facts+=("$city=$code"); fi
done
if [[ " ${cities[*]} " != *" ${facts[0]%=*} "* ]]; then
  echo "(${facts[0]%=*} is no harbour of $model/train.py: the checkpoint may not know it)"
fi

# The prose, repeated to the length, with a fact after the sentence nearest to 5, 30, 55 and 80 % of it.
# Its tokens have 4.03 bytes on average.
awk -v bytes=$((tokens * 403 / 100)) -v facts="${facts[*]}" '
  BEGIN { RS = "\001"; n = split(facts, fact, " ") }
  {
    while (length(text) < bytes) text = text $0
    text = substr(text, 1, bytes)
    sub(/[^.]*$/, "", text)
    from = 1
    for (i = 1; i <= n; ++i) {
      at = int(bytes * (0.05 + 0.25 * (i - 1)))
      at += index(substr(text, at), ". ") - 1
      split(fact[i], pair, "=")
      printf "%s The harbor code of %s is %s.", substr(text, from, at - from + 1), pair[1], pair[2]
      from = at + 1
    }
    printf "%s", substr(text, from)
  }' "$model/prose.txt" >"$run_dir/haystack.txt"

# ask CITY: the haystack and a question about it.
ask() {
  cp "$run_dir/haystack.txt" "$run_dir/prompt.txt"
  printf '\nQuestion: What is the harbor code of %s?\nAnswer: The harbor code of %s is ' "$1" "$1" \
    >>"$run_dir/prompt.txt"
}

# --- Worker and controller ---

# With --keep they outlive the terminal.
if ((keep)); then trap '' HUP; fi

say "3. Worker and controller"
# 22 MiB of "VRAM" hold the weights, the staging ring and some 1,700 tokens of KV; the rest spills. The
# link is paced so that neither processor alone is the best choice. One thread stands in for the
# device: a second would take the CPU worker's core on a small machine.
link_gbps=12
writescope-worker --model="$model" --device=cpu --vram-budget=22MiB --ring-size=4MiB --host-budget=256MiB \
  --prefill-chunk=256 --max-sequences=2 --device-threads=1 --workers=1 --link-gbps=$link_gbps --cut=planned \
  --listen=127.0.0.1:0 --control-listen=127.0.0.1:0 --metrics-listen=127.0.0.1:0 \
  >"$run_dir/worker.log" 2>&1 &
worker_pid=$!
listening=$(await_line "$run_dir/worker.log" $worker_pid '^LISTENING ' 30) ||
  fail "the worker opened no port within 30 s"
[[ "$listening" =~ generation=([^ ]+)\ control=([^ ]+)\ metrics=([^ ]+) ]] || fail "unexpected: $listening"
export WRITESCOPE_ADDRESS=${BASH_REMATCH[1]} WRITESCOPE_CONTROL_ADDRESS=${BASH_REMATCH[2]}
worker_metrics=${BASH_REMATCH[3]}
await_line "$run_dir/worker.log" $worker_pid '^READY' 60 >/dev/null || fail "the worker was not ready in 60 s"
sed -n '/memory:/,/^KV cache/p' "$run_dir/worker.log"
# The worker's own table, by its probe of the rates, is the same at every length.
share_at_start=$(writescope share show | awk '/ spilled / { share = $4 } END { print share }')

writescope-controller --worker="$WRITESCOPE_CONTROL_ADDRESS" --metrics-listen=127.0.0.1:0 \
  --decision-log="$run_dir/decisions.jsonl" >"$run_dir/controller.log" 2>&1 &
controller_pid=$!
listening=$(await_line "$run_dir/controller.log" $controller_pid '^LISTENING ' 30) ||
  fail "the controller opened no port within 30 s"
controller_metrics=${listening#*metrics=}
echo "worker at $WRITESCOPE_ADDRESS (process $worker_pid), controller (process $controller_pid)"

# --- Questions ---

say "4. A prompt of about $tokens tokens with facts planted in it (--seed=$seed)"
echo "planted: ${facts[*]}"
right=0
for pair in "${facts[@]}"; do
  city=${pair%=*}
  ask "$city"
  printf 'What is the harbor code of %s?  ' "$city"
  writescope generate --file="$run_dir/prompt.txt" --temperature=0 --max-tokens=12 --stop=$'\n' |
    tee "$run_dir/answer.txt" || fail "no answer about $city"
  if [[ "$(tr -d ' \n' <"$run_dir/answer.txt")" == "${pair#*=}"* ]]; then right=$((right + 1)); fi
done

if ((right < ${#facts[@]})); then fail "$right of ${#facts[@]} answers were right"; fi
echo "$right of ${#facts[@]} right. The later questions found the haystack in the prefix cache, spilled as it was."

# go_on: decodes prose after the haystack, to have steps to look at; its report goes to a file.
go_on() {
  writescope generate --file="$run_dir/haystack.txt" --temperature=0.7 --ignore-eos --max-tokens=200 \
    --report >"$run_dir/prose.txt" 2>"$run_dir/report.txt" || { cat "$run_dir/report.txt"; fail "no prose"; }
  metrics >"$run_dir/metrics.txt"
}
mean_share() { sed -n 's/^cpu share of spilled bytes: mean \([0-9.]*\),.*/\1/p' "$run_dir/report.txt"; }

say "5. It goes on writing, and the controller looks at the load"
for i in {1..30}; do
  go_on
  if is_true "$(metric controller_lease_active <"$run_dir/metrics.txt") == 1"; then break; fi
done
if ((i == 30)); then fail "the controller pushed no share table in $i requests"; fi
go_on
tail -c 230 "$run_dir/prose.txt"
echo
cat "$run_dir/report.txt"
share=$(mean_share)
echo "CPU's share of the spilled KV: $share_at_start by the worker's start-up probe, $share by the controller"

say "6. The simulated link becomes three times slower: the CPU's share has to rise"
writescope share link-pace $((link_gbps / 3))
for i in {1..30}; do
  go_on
  share_slow=$(mean_share)
  if is_true "$share_slow > $share + 0.03"; then break; fi
done
if ((i == 30)); then fail "the share stayed at $share_slow while the link became three times slower"; fi
echo "CPU's share of the spilled KV: $share before, $share_slow now"

# --- What was promised ---

say "7. The split"
writescope status
cached() { metric kv_used_bytes "region=\"$1\",state=\"cached\"" <"$run_dir/metrics.txt"; }
spilled=$(awk -v d="$(cached device)" -v t="$(cached stream)" -v w="$(cached swing)" -v h="$(cached host)" \
  'BEGIN { print (t + w + h) / (d + t + w + h) }')
moved=$(metric kv_moved_bytes_total <"$run_dir/metrics.txt")
cpu_tokens=$(metric attention_tokens_total 'device="cpu"' <"$run_dir/metrics.txt")
gpu_tokens=$(metric attention_tokens_total 'device="gpu"' <"$run_dir/metrics.txt")
streamed=$(metric kv_transfer_bytes_total 'direction="h2d"' <"$run_dir/metrics.txt")
updates=$(metric share_updates_total 'result="applied"' <"$run_dir/metrics.txt")
echo
all_tokens="($cpu_tokens + $gpu_tokens)"
printf '%-52s %s\n' \
  "facts recalled" "$right of ${#facts[@]}" \
  "KV outside the device budget" "$(percent "$spilled")" \
  "keys attended by the CPU, and by the device" "$(percent "$cpu_tokens / $all_tokens"), $(percent "$gpu_tokens / $all_tokens")" \
  "share tables that the controller pushed" "${updates%.*}" \
  "moved bytes" "${moved%.*}"
is_true "$spilled >= 0.7" ||
  fail "only $(percent "$spilled") of the KV lie outside the device budget; 70 % were promised"
is_true "$cpu_tokens > 0 && $gpu_tokens > 0 && $streamed > 0" ||
  fail "one processor attended to all: CPU $cpu_tokens keys, device $gpu_tokens, $streamed bytes streamed"
is_true "$moved == 0" || fail "$moved bytes of sealed KV were moved"

if ((keep)); then
  cat <<END

Worker and controller go on running. To call them:
  export PATH=$PWD/$build/bin:\$PATH
  export WRITESCOPE_ADDRESS=$WRITESCOPE_ADDRESS WRITESCOPE_CONTROL_ADDRESS=$WRITESCOPE_CONTROL_ADDRESS
  writescope generate 'Fellow citizens of the Senate' --max-tokens=60
  writescope status --watch
  curl -s http://$worker_metrics/metrics        (controller: http://$controller_metrics/metrics)
Logs are in $run_dir. To stop them: kill $controller_pid $worker_pid
END
else
  cat <<END

All as promised; worker and controller are being stopped. Next:
  deploy/quickstart.sh --keep     the same, and they stay up for calls of yours
  tests/run.sh                    every test
  README.md                       serving a checkpoint of your own, calling it from Python
END
fi
