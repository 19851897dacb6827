#include "engine/attention/worker_claims.h"

#include <algorithm>

#include "engine/base/units.h"

namespace writescope::attention {
namespace {

// Small enough to share work evenly at the end of a layer, large enough that a claim costs nothing.
constexpr int64_t kClaimBytes = 128 * kKiB;
constexpr int64_t kLastClaimBytes = 256 * kKiB;
constexpr int64_t kLeastClaimsPerWorker = 32;
// What is left is divided by so many for each worker: the first claims of a layer are nearly all
// that a worker gets, since what it turns out to have no time for others take. Where the link
// claims too it has to find its part.
constexpr double kClaimsPerWorker = 1;
constexpr double kGuidedClaimsPerWorker = 2;
constexpr double kLeastShare = 1.0 / 32;
constexpr int64_t kBeginBytes = 512 * kKiB;
constexpr int64_t kTakeBytes = 256 * kKiB;

bool HaveSameReaders(const RunList& runs, const Run& a, const Run& b) {
  return std::ranges::equal(ReadersOf(runs, a), ReadersOf(runs, b));
}

}  // namespace

int64_t CutNear(const RunList& runs, const RunQueue& queue, int64_t block, int64_t slack) {
  if (block <= 0 || block >= queue.num_blocks()) return block;
  const std::vector<Run>& all = queue.runs();
  // Where the readers at the block begin, and where the next ones do: looked for no further than
  // `slack`, since of what has grown in a full cache each block is a run.
  size_t i = queue.RunAt(block);
  size_t next = i + 1;
  while (i > 0 && block - queue.start(i) <= slack && HaveSameReaders(runs, all[i - 1], all[i])) --i;
  const auto start = [&](size_t run) {
    return run < all.size() ? queue.start(run) : queue.num_blocks();
  };
  while (next < all.size() && start(next) - block <= slack &&
         HaveSameReaders(runs, all[next - 1], all[next])) {
    ++next;
  }
  const int64_t first = queue.start(i), behind = start(next);
  const int64_t back = block - first, on = behind - block;
  if (std::min(back, on) > slack) return block;
  return back <= on ? first : behind;
}

WorkerClaims::WorkerClaims(const KvGeometry& geometry, int num_workers)
    : least_claim_(std::max<int64_t>(1, kClaimBytes / geometry.block_bytes())),
      least_of_large_layer_(std::max(least_claim_, kLastClaimBytes / geometry.block_bytes())),
      most_claim_(std::max(least_claim_, kMaxClaimBytes / geometry.block_bytes())),
      most_begun_(std::max(least_claim_, kBeginBytes / geometry.block_bytes())),
      least_taken_(std::max(least_claim_, kTakeBytes / geometry.block_bytes())),
      claimed_(static_cast<size_t>(num_workers)) {}

void WorkerClaims::Clear() {
  for (ClaimedBlocks& claimed : claimed_) claimed.Clear();
}

int64_t WorkerClaims::Wanted(const StepContext& step, int64_t left, int64_t num_blocks) const {
  // Together the first claims are no more than the CPU's part of the list.
  const double claims =
      step.guided ? std::max(kGuidedClaimsPerWorker, 1 / std::max(step.cpu_share, kLeastShare))
                  : kClaimsPerWorker;
  // Each claim costs a start. In a layer so large nobody waits long for the last twice as large.
  const int64_t least = std::clamp(num_blocks / (kLeastClaimsPerWorker * step.num_workers),
                                   least_claim_, least_of_large_layer_);
  const double wanted = static_cast<double>(left) / (claims * step.num_workers);
  return std::clamp(static_cast<int64_t>(wanted), least, most_claim_);
}

bool WorkerClaims::Claim(int worker, StepContext& step, int turn) {
  TurnProgress& progress = step.turns[turn];
  const RunList& runs = step.attention(turn).runs;
  ClaimedBlocks& claimed = claimed_[static_cast<size_t>(worker)];
  const int64_t swing_blocks = runs.swing.num_blocks();
  const int64_t host_blocks = step.host_blocks(turn);
  // Host blocks first: nobody else can take them.
  const int64_t begin = progress.host_claimed.load(std::memory_order_relaxed);
  if (begin < host_blocks) {
    int64_t wanted = Wanted(step, host_blocks - begin, host_blocks);
    wanted = CutNear(runs, runs.host, begin + wanted, wanted / 3) - begin;
    const int64_t first = progress.host_claimed.fetch_add(wanted, std::memory_order_seq_cst);
    if (first < host_blocks) {
      claimed.Set(turn, {swing_blocks + first, std::min(wanted, host_blocks - first)});
      return true;
    }
  }
  const int64_t end = swing_blocks - progress.swing.back();
  int64_t wanted = Wanted(step, progress.swing.remaining_back(), swing_blocks);
  wanted = end - CutNear(runs, runs.swing, end - wanted, wanted / 3);
  const MeetCursor::Claim swing = progress.swing.ClaimBack(wanted);
  if (swing.count == 0) return false;
  claimed.Set(turn, {swing.first, swing.count});
  return true;
}

bool WorkerClaims::HasOther(int worker, const StepContext& step, int turn) const {
  for (int other = 0; other < step.num_workers; ++other) {
    if (other != worker && left(other, turn).count > 1) return true;
  }
  return false;
}

bool WorkerClaims::TakeFromOther(int worker, const StepContext& step, int turn,
                                 absl::FunctionRef<bool(const Run&)> has_begun,
                                 std::vector<Run>* parts) {
  while (true) {
    int most = -1;
    Range range;
    for (int i = 1; i < step.num_workers; ++i) {
      const int other = (worker + i) % step.num_workers;
      const Range of_other = left(other, turn);
      if (of_other.count <= range.count) continue;
      most = other;
      range = of_other;
    }
    if (most < 0) return false;
    Slice(step, turn, {range.first + range.count - 1, 1}, parts);
    const int64_t least = has_begun(parts->front()) ? 1 : least_taken_;
    if (range.count < least) return false;
    range = claimed_[static_cast<size_t>(most)].TakeLast(turn, least);
    if (range.count == 0) continue;  // Others were faster: there is less now.
    claimed_[static_cast<size_t>(worker)].Set(turn, range);
    return true;
  }
}

ClaimedBlocks::Range WorkerClaims::Begin(int worker, int turn) {
  return claimed_[static_cast<size_t>(worker)].TakeFirst(turn, least_claim_, most_begun_);
}

bool WorkerClaims::HasPlenty(const StepContext& step, int turn) const {
  const TurnProgress& progress = step.turns[turn];
  const int64_t host_left =
      step.host_blocks(turn) - progress.host_claimed.load(std::memory_order_relaxed);
  return std::max<int64_t>(host_left, 0) + progress.swing.remaining_back() >
         2 * least_claim_ * step.num_workers;
}

void WorkerClaims::Slice(const StepContext& step, int turn, Range range, std::vector<Run>* parts) {
  parts->clear();
  const RunList& runs = step.attention(turn).runs;
  const int64_t swing_blocks = runs.swing.num_blocks();
  if (range.first < swing_blocks) {
    runs.swing.Slice(range.first, range.count, parts);
  } else {
    runs.host.Slice(range.first - swing_blocks, range.count, parts);
  }
}

}  // namespace writescope::attention
