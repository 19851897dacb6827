// Streams a step's spilled runs over the link, turn after turn, through a staging ring. It never
// waits for a query: when a turn's list is exhausted it goes on with the next one, as far as the
// ring has room.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/attention/step_attention.h"
#include "engine/base/bounded_queue.h"
#include "engine/device/device.h"

namespace writescope::attention {

// What has been put on the way: the device may attend to `spans` once `landed`.
struct Wave {
  int turn = 0;
  bool end_of_turn = false;  // Nothing more comes for this turn; `spans` is then empty.
  std::vector<ops::AttendSpan> spans;
  device::Event landed;
  int slot = -1;  // Of the ring, to be given back with Release; -1 without one.
};

// Bytes and times of one copy, for the step's statistics.
struct CopyRecord {
  int64_t size_bytes = 0;
  bool follows_previous = false;  // It was queued behind another: it starts at that one's end.
  double start_s = 0;
  double end_s = 0;
};

class LinkPump {
 public:
  struct Options {
    KvGeometry geometry;
    int64_t ring_bytes = 0;
    absl::Duration wait_limit = absl::Seconds(2);
  };
  // The smallest ring that works: one block for each of the copies in flight, and one being read.
  static int64_t MinRingBytes(const KvGeometry& geometry);
  static absl::StatusOr<std::unique_ptr<LinkPump>> Create(const Options& options,
                                                          device::Device& device);
  // As Stop, and then waits for the copies that are under way: they write to the ring.
  ~LinkPump();

  // Engine thread. The last step must have ended.
  void Start(StepContext* step);
  // Engine thread: the next wave, in order; nothing when none comes within the wait limit. Time in
  // which the pump waits for the device to read a slot does not count: the device has dense work
  // too, and how long that takes is its own affair.
  std::optional<Wave> NextWave();
  // Engine thread: whether NextWave would return at once.
  bool HasWave() const { return !waves_->empty(); }
  // Engine thread: the slot's bytes are needed until `read`.
  void Release(int slot, device::Event read);
  // Waves that may be kept for one call before they are released: few enough that the pump always
  // finds slots.
  int waves_per_call() const { return waves_per_call_; }
  // Engine thread: whether the step's copies have all been put on the way, or given up.
  bool AwaitDone(absl::Duration timeout);
  // Of the last step, with all times filled in; call after AwaitDone and after the upload queue is
  // idle.
  const std::deque<CopyRecord>& FinishCopies();
  const std::deque<CopyRecord>& copies() const { return copies_; }
  // Blocks that the link should claim next: a slot's worth, but an eighth of what is left, down to
  // `smallest`, where the CPU claims too, so that both sides end together. Ahead of the CPU there
  // is nobody to end with, and small copies would only be slow. The last `cpu_reserve` are the
  // CPU's: 0 when no more are left.
  struct Guide {
    int64_t slot_blocks = 1;
    int64_t smallest = 1;
    int64_t cpu_reserve = 0;
  };
  static int64_t ClaimBlocks(const MeetCursor& cursor, const Guide& guide);
  // Engine thread: ends the pump's thread, for good. From then on nothing is submitted here; what
  // has been may still run. The step must have been aborted or have ended.
  void Stop();
  // After a step that failed, with all queues idle: takes every slot back.
  void ResetRing();

 private:
  struct FreeSlot {
    int index;
    device::Event read;
  };
  LinkPump(const Options& options, device::Device& device, device::Buffer ring);
  void Loop();
  bool StreamTurn(StepContext& step, int turn);
  bool Stopped(StepContext& step, int turn) const;
  // Copies the parts and hands them over as waves. False: told to stop.
  bool StreamParts(StepContext& step, int turn, const std::vector<Run>& parts);
  // Bytes to be copied in one go.
  struct Piece {
    std::byte* to = nullptr;
    const std::byte* from = nullptr;
    int64_t size_bytes = 0;
    // Takes more that follows on both sides, while it stays a copy of ordinary size.
    bool Extend(const std::byte* more_to, const std::byte* more_from, int64_t more_bytes);
  };
  // Submits the piece, if there is one, and leaves none.
  bool CopyPiece(StepContext& step, Piece* piece);
  std::optional<FreeSlot> TakeSlot(const StepContext& step);
  std::byte* SlotAddress(int index) const { return ring_.data() + index * slot_bytes_; }

  const Options options_;
  device::Device& device_;
  device::Buffer ring_;
  int64_t slot_blocks_ = 1;
  int64_t slot_bytes_ = 0;
  int num_slots_ = 0;
  int waves_per_call_ = 1;

  std::unique_ptr<BoundedQueue<FreeSlot>> free_slots_;
  std::unique_ptr<BoundedQueue<Wave>> waves_;
  BoundedQueue<StepContext*> steps_{1};
  std::atomic<uint64_t> device_waits_{0};  // Begun and ended: odd while the pump is in one
  std::deque<CopyRecord> copies_;          // Pump thread during a step; deque: addresses stay
  std::deque<device::Event> in_flight_;    // Pump thread

  std::mutex mutex_;
  std::condition_variable idle_;
  bool busy_ = false;  // Guarded by mutex_
  std::thread thread_;
};

}  // namespace writescope::attention
