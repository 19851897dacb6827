#!/bin/sh
# CPU attention under a cgroup quota beside the same program pinned to as many cores, in turns. Either
# starts as many workers as the worker itself would by its rule.
#
# usage: cpu_quota_bench.sh BENCH_CPU_ATTENTION [CPUS]      CPUS: 4 by default, fewer than there are
# Ends with 77, a skip, where no cgroup can be made, and with 1 where the quota costs over a tenth.
set -eu
if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
  sed -n '2,6s/^# \{0,1\}//p' "$0"
  exit 0
fi
bench=${1:-}
cpus=${2:-4}
if [ ! -x "$bench" ] || ! [ "$cpus" -ge 1 ] 2> /dev/null; then
  echo "cpu_quota_bench.sh: '$*' is no program, with a number of CPUs if any; see --help" >&2
  exit 2
fi
rounds=5
if [ "$(nproc)" -le "$cpus" ]; then
  echo "skipped: $(nproc) cores, more than $cpus are needed"
  exit 77
fi

v1=/sys/fs/cgroup/cpu
if [ -f /sys/fs/cgroup/cgroup.controllers ]; then
  group=/sys/fs/cgroup/writescope-quota-$$
  { echo +cpu > /sys/fs/cgroup/cgroup.subtree_control && mkdir "$group" &&
    echo "$((cpus * 100000)) 100000" > "$group/cpu.max"; } 2> /dev/null || group=
elif [ -d $v1 ]; then
  group=$v1/writescope-quota-$$
  { mkdir "$group" && echo 100000 > "$group/cpu.cfs_period_us" &&
    echo $((cpus * 100000)) > "$group/cpu.cfs_quota_us"; } 2> /dev/null || group=
else
  group=
fi
if [ -z "$group" ]; then
  echo "skipped: no cgroup with a quota can be made here"
  exit 77
fi
trap 'rmdir "$group" 2> /dev/null || true' EXIT

# Prints the GB/s of attention, and the workers.
rate() {
  "$@" --threads 0 --context 8192 --memory-mib 1024 --pairs 5 --model Mixtral-8x7B --isa avx2 |
    awk '/GB\/s/ {for (i = 1; i < NF; ++i) if ($i == "of") print $(i - 1), $4}'
}
in_group() { sh -c 'echo $$ > "$0/cgroup.procs" && exec "$@"' "$group" "$@"; }
pinned() { taskset -c "0-$((cpus - 1))" "$@"; }

results=
round=0
while [ $round -lt $rounds ]; do
  quota=$(rate in_group "$bench")
  pin=$(rate pinned "$bench")
  echo "quota of $cpus CPUs: ${quota% *} GB/s with ${quota#* } workers; pinned: ${pin% *} with ${pin#* }"
  results="$results$(echo "${quota% *} ${pin% *}" | awk '{print $1 / $2}')
"
  round=$((round + 1))
done
printf '%s' "$results" | sort -n | awk -v middle=$(((rounds + 1) / 2)) '
  NR == middle {printf "quota over pinned, median: %.3f\n", $1; low = $1 < 0.9}
  END {exit low}'
