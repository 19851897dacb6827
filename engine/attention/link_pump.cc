#include "engine/attention/link_pump.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/base/check.h"
#include "engine/base/status_macros.h"
#include "engine/base/timed_wait.h"
#include "engine/base/units.h"

namespace writescope::attention {
namespace {

// Copies of this size reach the link's full rate; larger ones only make the ring coarse.
constexpr int64_t kSlotBytes = 2 * kMiB;
// Attending to this much takes the device a few microseconds, the time of a few launches.
constexpr int64_t kCallBytes = 16 * kMiB;
constexpr int64_t kSmallestGuidedBytes = 256 * kKiB;
constexpr int64_t kMostReserve = 32;
// Two copies in flight keep the link busy; more would claim work long before it is done.
constexpr size_t kCopiesInFlight = 2;
constexpr int kMinSlots = static_cast<int>(kCopiesInFlight) + 1;
constexpr size_t kMaxWaves = 4096;
constexpr int kSpins = 2000;

}  // namespace

int64_t LinkPump::MinRingBytes(const KvGeometry& geometry) {
  return kMinSlots * geometry.block_bytes();
}

absl::StatusOr<std::unique_ptr<LinkPump>> LinkPump::Create(const Options& options,
                                                           device::Device& device) {
  const int64_t min_bytes = MinRingBytes(options.geometry);
  if (options.ring_bytes < min_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a staging ring of ", options.ring_bytes, " bytes; this model needs at least ", min_bytes));
  }
  ASSIGN_OR_RETURN(device::Buffer ring, device.AllocateDevice(options.ring_bytes, "staging ring"));
  return std::unique_ptr<LinkPump>(new LinkPump(options, device, std::move(ring)));
}

LinkPump::LinkPump(const Options& options, device::Device& device, device::Buffer ring)
    : options_(options), device_(device), ring_(std::move(ring)) {
  const int64_t block_bytes = options.geometry.block_bytes();
  const int64_t wanted = std::min(kSlotBytes, options.ring_bytes / (2 * kMinSlots));
  slot_blocks_ = std::max<int64_t>(1, wanted / block_bytes);
  slot_bytes_ = slot_blocks_ * block_bytes;
  num_slots_ = static_cast<int>(options.ring_bytes / slot_bytes_);
  waves_per_call_ = static_cast<int>(
      std::clamp<int64_t>(num_slots_ / 4, 1, std::max<int64_t>(1, kCallBytes / slot_bytes_)));
  ResetRing();
  thread_ = std::thread([this] { Loop(); });
}

LinkPump::~LinkPump() {
  Stop();
  device::AwaitIdle({&device_.upload()}, "link pump");
}

void LinkPump::Stop() {
  steps_.Close();
  free_slots_->Close();
  waves_->Close();
  if (thread_.joinable()) thread_.join();
}

void LinkPump::ResetRing() {
  free_slots_ = std::make_unique<BoundedQueue<FreeSlot>>(static_cast<size_t>(num_slots_));
  for (int slot = 0; slot < num_slots_; ++slot) CHECK(free_slots_->TryPush({slot, {}}));
  waves_ = std::make_unique<BoundedQueue<Wave>>(kMaxWaves);
}

void LinkPump::Start(StepContext* step) {
  copies_.clear();
  in_flight_.clear();
  {
    std::lock_guard lock(mutex_);
    CHECK(!busy_) << "the pump is still at the last step";
    busy_ = true;
  }
  CHECK(steps_.Push(step));
}

std::optional<Wave> LinkPump::NextWave() {
  // Where waves come every few tens of microseconds, to be woken for one takes too long.
  for (int spin = 0; !device_.link().simulated && spin < kSpins && waves_->empty(); ++spin) {
    __builtin_ia32_pause();
  }
  uint64_t waits_before = device_waits_.load(std::memory_order_acquire);
  while (true) {
    std::optional<Wave> wave = waves_->Pop(options_.wait_limit);
    const uint64_t waits = device_waits_.load(std::memory_order_acquire);
    if (wave.has_value() || (waits == waits_before && waits % 2 == 0)) return wave;
    waits_before = waits;
  }
}

void LinkPump::Release(int slot, device::Event read) { CHECK(free_slots_->TryPush({slot, read})); }

bool LinkPump::AwaitDone(absl::Duration timeout) {
  std::unique_lock lock(mutex_);
  return TimedWait(idle_, lock, timeout, [this] { return !busy_; });
}

const std::deque<CopyRecord>& LinkPump::FinishCopies() {
  for (size_t i = 1; i < copies_.size(); ++i) {
    if (copies_[i].follows_previous) copies_[i].start_s = copies_[i - 1].end_s;
  }
  return copies_;
}

void LinkPump::Loop() {
  while (std::optional<StepContext*> next = steps_.Pop()) {
    StepContext& step = **next;
    for (int turn = 0; turn < step.num_turns; ++turn) {
      if (!StreamTurn(step, turn)) break;
    }
    std::lock_guard lock(mutex_);
    busy_ = false;
    idle_.notify_all();
  }
}

bool LinkPump::Stopped(StepContext& step, int turn) const {
  if (step.abort.load(std::memory_order_relaxed)) return true;
  return step.hook && !step.hook(Side::kLink, turn);
}

int64_t LinkPump::ClaimBlocks(const MeetCursor& cursor, const Guide& guide) {
  const int64_t left = cursor.remaining() - guide.cpu_reserve;
  const int64_t wanted =
      cursor.back() == 0
          ? guide.slot_blocks
          : std::clamp(left / 8, std::min(guide.smallest, guide.slot_blocks), guide.slot_blocks);
  return std::clamp<int64_t>(left, 0, wanted);
}

bool LinkPump::StreamTurn(StepContext& step, int turn) {
  const RunList& runs = step.attention(turn).runs;
  std::vector<Run> parts;
  runs.stream.Slice(0, runs.stream.num_blocks(), &parts);
  if (!step.handoff) runs.host.Slice(0, runs.host.num_blocks(), &parts);
  if (!parts.empty() && (Stopped(step, turn) || !StreamParts(step, turn, parts))) return false;

  MeetCursor& cursor = step.turns[turn].swing;
  const int64_t block_bytes = options_.geometry.block_bytes();
  // No more than a thirty-second of a list: whatever the CPU's pace has come to be, it costs
  // little.
  const Guide guide = {.slot_blocks = slot_blocks_,
                       .smallest = std::max<int64_t>(1, kSmallestGuidedBytes / block_bytes),
                       .cpu_reserve = std::min(step.cpu_reserve_bytes / block_bytes,
                                               runs.swing.num_blocks() / kMostReserve)};
  while (true) {
    if (Stopped(step, turn)) return false;
    const MeetCursor::Claim claim =
        cursor.ClaimFront(step.guided ? ClaimBlocks(cursor, guide) : slot_blocks_);
    if (claim.count == 0) break;
    parts.clear();
    runs.swing.Slice(claim.first, claim.count, &parts);
    if (!StreamParts(step, turn, parts)) return false;
  }
  if (step.handoff) step.SignalIfDone(turn);
  return waves_->Push({.turn = turn, .end_of_turn = true, .spans = {}, .landed = {}, .slot = -1});
}

bool LinkPump::StreamParts(StepContext& step, int turn, const std::vector<Run>& parts) {
  const int64_t block_bytes = options_.geometry.block_bytes();
  Wave wave{.turn = turn, .end_of_turn = false, .spans = {}, .landed = {}, .slot = -1};
  Piece piece;
  int64_t slot_used = 0;
  const auto hand_over = [&] {
    if (wave.spans.empty()) return true;
    if (!CopyPiece(step, &piece)) return false;
    wave.landed = in_flight_.back();
    const bool pushed = waves_->Push(std::move(wave));
    wave = Wave{.turn = turn, .end_of_turn = false, .spans = {}, .landed = {}, .slot = -1};
    slot_used = 0;
    return pushed;
  };
  for (const Run& part : parts) {
    const kvcache::Region& region = step.blocks->region(part.region);
    for (int done = 0; done < part.num_blocks;) {
      int64_t count = std::min<int64_t>(part.num_blocks - done, slot_blocks_);
      std::byte* to = nullptr;
      if (part.retain_index >= 0) {
        to = step.blocks->region(kvcache::RegionKind::kDevice)
                 .Address(step.layer(turn), part.retain_index + done);
      } else {
        if (slot_used == slot_blocks_ && !hand_over()) return false;
        if (wave.slot < 0) {
          const std::optional<FreeSlot> slot = TakeSlot(step);
          if (!slot.has_value()) return false;
          device_.upload().WaitFor(slot->read);
          wave.slot = slot->index;
        }
        count = std::min(count, slot_blocks_ - slot_used);
        to = SlotAddress(wave.slot) + slot_used * block_bytes;
        slot_used += count;
      }
      const std::byte* from = region.Address(step.layer(turn), part.first_index + done);
      // Runs of several sequences often lie one after the other: that is one copy.
      if (!piece.Extend(to, from, count * block_bytes)) {
        if (!CopyPiece(step, &piece)) return false;
        piece = {to, from, count * block_bytes};
      }
      wave.spans.push_back({.base = to,
                            .num_blocks = static_cast<int>(count),
                            .num_tokens = count * kBlockTokens,
                            .first_position = part.first_position + int64_t{done} * kBlockTokens,
                            .first_reader = part.first_reader,
                            .num_readers = part.num_readers});
      done += static_cast<int>(count);
    }
  }
  return hand_over();
}

bool LinkPump::Piece::Extend(const std::byte* more_to, const std::byte* more_from,
                             int64_t more_bytes) {
  if (size_bytes == 0 || to + size_bytes != more_to || from + size_bytes != more_from) return false;
  if (size_bytes + more_bytes > kSlotBytes) return false;
  size_bytes += more_bytes;
  return true;
}

bool LinkPump::CopyPiece(StepContext& step, Piece* piece) {
  if (piece->size_bytes == 0) return true;
  while (in_flight_.size() >= kCopiesInFlight) {
    if (!in_flight_.front().Wait(options_.wait_limit).ok()) return false;
    in_flight_.pop_front();
    if (step.abort.load(std::memory_order_relaxed)) return false;
  }
  // A copy that is queued behind another begins when that ends: its start needs no time of its own.
  const bool queued = !in_flight_.empty() && !in_flight_.back().Done();
  CopyRecord& record = copies_.emplace_back();
  record.size_bytes = piece->size_bytes;
  record.follows_previous = queued;
  device::Queue& queue = device_.upload();
  if (!queued) queue.RecordTime(&record.start_s);
  queue.Copy(piece->to, piece->from, piece->size_bytes);
  // First what somebody may wait for.
  in_flight_.push_back(queue.Record());
  queue.RecordTime(&record.end_s);
  *piece = {};
  return true;
}

std::optional<LinkPump::FreeSlot> LinkPump::TakeSlot(const StepContext& step) {
  // The engine thread gives a slot back when it launches its reader; it may be busy for a while.
  while (!step.abort.load(std::memory_order_relaxed)) {
    if (std::optional<FreeSlot> slot = free_slots_->Pop(absl::Milliseconds(50))) {
      // Waiting here, not only on the queue, keeps claims from running ahead of the ring.
      bool read = slot->read.Done();
      if (!read) device_waits_.fetch_add(1, std::memory_order_acq_rel);
      absl::Status waited;
      // A queue that is broken says so at once, and from then on.
      while (!read && !step.abort.load(std::memory_order_relaxed) &&
             (waited.ok() || absl::IsDeadlineExceeded(waited))) {
        waited = slot->read.Wait(absl::Milliseconds(50));
        read = waited.ok();
      }
      if (device_waits_.load(std::memory_order_relaxed) % 2 != 0) {
        device_waits_.fetch_add(1, std::memory_order_acq_rel);
      }
      if (!read) return std::nullopt;
      return slot;
    }
    if (free_slots_->closed()) return std::nullopt;
  }
  return std::nullopt;
}

}  // namespace writescope::attention
