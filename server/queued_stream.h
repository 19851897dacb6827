// The server's end of a stream of messages: a bounded queue that others fill, and one thread that
// starts the writes, so that neither the engine thread nor gRPC's own are held up by a client.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "google/protobuf/message_lite.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/server_callback.h"

namespace writescope::server {

class QueuedStream;

// Starts the writes of all streams, on a thread of its own. Thread-safe.
class StreamPump {
 public:
  StreamPump();
  ~StreamPump();
  // The stream has something to do. Returns at once; each stream waits in the list at most once.
  void Schedule(std::shared_ptr<QueuedStream> stream);
  // Looks at the stream's limit of time until it is over.
  void Watch(std::shared_ptr<QueuedStream> stream);

 private:
  void Loop();

  absl::Mutex mutex_;
  std::deque<std::shared_ptr<QueuedStream>> ready_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::weak_ptr<QueuedStream>> watched_ ABSL_GUARDED_BY(mutex_);
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

struct StreamLimits {
  size_t max_queued_bytes = size_t{1} << 20;
  size_t max_queued_messages = 1 << 16;
  // How long a client may take to read the rest of a stream that has ended, before it is cut off.
  absl::Duration max_stall = absl::Seconds(10);
};

// One call. gRPC calls the On... methods; everything else is thread-safe. Keeps itself alive from
// HoldUntilDone (which the service's handler calls) until gRPC has done with the call.
class QueuedStream : public grpc::ServerWriteReactor<grpc::ByteBuffer>,
                     public std::enable_shared_from_this<QueuedStream> {
 public:
  using Message = google::protobuf::MessageLite;

  QueuedStream(grpc::CallbackServerContext* context, StreamPump* pump, StreamLimits limits)
      : context_(context), pump_(pump), limits_(limits) {}
  ~QueuedStream() override = default;

  void HoldUntilDone() { self_ = shared_from_this(); }

  // Sends the initial metadata, which commits the call: gRPC does not retry it any more.
  void Commit();
  // False when the client is so far behind that the queue is full. True and forgotten after the
  // end.
  bool Push(std::unique_ptr<Message> message);
  // Never full: the oldest message makes room, and the next one tells of the loss by SetDropped.
  void PushDroppingOldest(std::unique_ptr<Message> message);
  // The status goes out behind what is queued; only the first End counts. True if this was it.
  bool End(grpc::Status status);
  // The same, but what is queued is forgotten.
  bool EndNow(grpc::Status status);
  bool ended() const;

  // For StreamPump.
  void StartNext();
  bool CutOffIfStalled(absl::Time now);  // True: look no more.
  bool MarkScheduled() { return !scheduled_.exchange(true); }
  void ClearScheduled() { scheduled_.store(false); }

 protected:
  // The client went away, its deadline passed, or the server cancelled. Any thread, at most once.
  virtual void OnClientGone() = 0;
  // gRPC has done with the call; `context` is no more.
  virtual void OnOver() {}
  virtual void SetDropped(Message& /*message*/, uint64_t /*dropped*/) {}

 private:
  void OnSendInitialMetadataDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;
  bool EndWith(grpc::Status status, bool forget_queue);
  void OperationDone(bool ok);

  struct Item {
    std::unique_ptr<Message> message;
    size_t bytes = 0;
  };

  grpc::CallbackServerContext* const context_;
  StreamPump* const pump_;
  const StreamLimits limits_;
  std::shared_ptr<QueuedStream> self_;  // The call's own share; see HoldUntilDone.
  std::atomic<bool> scheduled_{false};
  grpc::ByteBuffer outgoing_;  // Of the running write.

  mutable absl::Mutex mutex_;
  std::deque<Item> queue_ ABSL_GUARDED_BY(mutex_);
  size_t queued_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t dropped_ ABSL_GUARDED_BY(mutex_) = 0;
  std::optional<grpc::Status> end_ ABSL_GUARDED_BY(mutex_);
  absl::Time ended_at_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();
  bool commit_wanted_ ABSL_GUARDED_BY(mutex_) = false;
  bool committed_ ABSL_GUARDED_BY(mutex_) = false;
  bool operation_running_ ABSL_GUARDED_BY(mutex_) = false;
  bool broken_ ABSL_GUARDED_BY(mutex_) = false;       // A write failed; nothing can be sent.
  bool cutting_off_ ABSL_GUARDED_BY(mutex_) = false;  // Keeps `context_` alive meanwhile.
  bool finish_started_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace writescope::server
