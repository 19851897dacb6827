#include "server/queued_stream.h"

#include <algorithm>
#include <utility>

#include "engine/base/clock.h"
#include "grpcpp/server_context.h"
#include "server/wire.h"

namespace writescope::server {
namespace {

// What a queued message costs beside its bytes on the wire.
constexpr size_t kItemOverheadBytes = 128;
constexpr absl::Duration kWatchInterval = absl::Milliseconds(100);

}  // namespace

StreamPump::StreamPump() : thread_([this] { Loop(); }) {}

StreamPump::~StreamPump() {
  {
    absl::MutexLock lock(&mutex_);
    stopped_ = true;
  }
  thread_.join();
}

void StreamPump::Schedule(std::shared_ptr<QueuedStream> stream) {
  if (!stream->MarkScheduled()) return;
  absl::MutexLock lock(&mutex_);
  ready_.push_back(std::move(stream));
}

void StreamPump::Watch(std::shared_ptr<QueuedStream> stream) {
  absl::MutexLock lock(&mutex_);
  watched_.push_back(std::move(stream));
}

void StreamPump::Loop() {
  while (true) {
    std::deque<std::shared_ptr<QueuedStream>> ready;
    std::vector<std::weak_ptr<QueuedStream>> watched;
    {
      absl::MutexLock lock(&mutex_);
      const auto has_work = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
        return stopped_ || !ready_.empty();
      };
      mutex_.AwaitWithTimeout(absl::Condition(&has_work),
                              watched_.empty() ? absl::InfiniteDuration() : kWatchInterval);
      if (stopped_ && ready_.empty()) return;
      ready.swap(ready_);
      watched.swap(watched_);
    }
    for (const std::shared_ptr<QueuedStream>& stream : ready) {
      stream->ClearScheduled();  // Before the look: what comes in now is scheduled anew.
      stream->StartNext();
    }
    const absl::Time now = Clock::Real().Now();
    std::erase_if(watched, [now](const std::weak_ptr<QueuedStream>& weak) {
      const std::shared_ptr<QueuedStream> stream = weak.lock();
      return stream == nullptr || stream->CutOffIfStalled(now);
    });
    absl::MutexLock lock(&mutex_);
    watched_.insert(watched_.end(), watched.begin(), watched.end());
  }
}

void QueuedStream::Commit() {
  {
    absl::MutexLock lock(&mutex_);
    commit_wanted_ = true;
  }
  pump_->Schedule(shared_from_this());
}

bool QueuedStream::Push(std::unique_ptr<Message> message) {
  const size_t bytes = message->ByteSizeLong() + kItemOverheadBytes;
  {
    absl::MutexLock lock(&mutex_);
    if (end_.has_value() || broken_) return true;
    // A message that alone is over the limit may wait alone.
    if (!queue_.empty() && (queued_bytes_ + bytes > limits_.max_queued_bytes ||
                            queue_.size() >= limits_.max_queued_messages)) {
      return false;
    }
    queued_bytes_ += bytes;
    queue_.push_back({std::move(message), bytes});
  }
  pump_->Schedule(shared_from_this());
  return true;
}

void QueuedStream::PushDroppingOldest(std::unique_ptr<Message> message) {
  const size_t bytes = message->ByteSizeLong() + kItemOverheadBytes;
  {
    absl::MutexLock lock(&mutex_);
    if (end_.has_value() || broken_) return;
    while (!queue_.empty() && (queued_bytes_ + bytes > limits_.max_queued_bytes ||
                               queue_.size() >= limits_.max_queued_messages)) {
      queued_bytes_ -= queue_.front().bytes;
      queue_.pop_front();
      ++dropped_;
    }
    queued_bytes_ += bytes;
    queue_.push_back({std::move(message), bytes});
  }
  pump_->Schedule(shared_from_this());
}

bool QueuedStream::End(grpc::Status status) { return EndWith(std::move(status), false); }

bool QueuedStream::EndNow(grpc::Status status) { return EndWith(std::move(status), true); }

bool QueuedStream::EndWith(grpc::Status status, bool forget_queue) {
  bool may_stall = false;
  {
    absl::MutexLock lock(&mutex_);
    if (end_.has_value()) return false;
    end_ = std::move(status);
    ended_at_ = Clock::Real().Now();
    if (forget_queue) {
      queue_.clear();
      queued_bytes_ = 0;
    }
    may_stall = operation_running_ || !queue_.empty();
  }
  if (may_stall) pump_->Watch(shared_from_this());
  pump_->Schedule(shared_from_this());
  return true;
}

bool QueuedStream::ended() const {
  absl::MutexLock lock(&mutex_);
  return end_.has_value();
}

void QueuedStream::StartNext() {
  enum class Next { kNothing, kCommit, kWrite, kFinish } next = Next::kNothing;
  Item item;
  uint64_t dropped = 0;
  grpc::Status status;
  {
    absl::MutexLock lock(&mutex_);
    if (operation_running_ || finish_started_ || cutting_off_) return;
    if (commit_wanted_ && !committed_ && !broken_) {
      next = Next::kCommit;
    } else if (!queue_.empty() && !broken_) {
      next = Next::kWrite;
      item = std::move(queue_.front());
      queue_.pop_front();
      queued_bytes_ -= item.bytes;
      dropped = std::exchange(dropped_, 0);
    } else if (end_.has_value()) {
      next = Next::kFinish;
      status = *end_;
      finish_started_ = true;
    } else {
      return;
    }
    committed_ = true;
    operation_running_ = next != Next::kFinish;
  }
  // Without the lock: gRPC may run other calls' callbacks in here.
  if (next == Next::kCommit) {
    StartSendInitialMetadata();
  } else if (next == Next::kWrite) {
    if (dropped > 0) SetDropped(*item.message, dropped);
    if (SerializeMessage(*item.message, &outgoing_)) {
      StartWrite(&outgoing_);
    } else {
      EndNow(grpc::Status(grpc::StatusCode::INTERNAL, "a message of the answer is above 2 GiB"));
      OperationDone(true);
    }
  } else {
    Finish(status);  // `this` may be gone from here on.
  }
}

bool QueuedStream::CutOffIfStalled(absl::Time now) {
  {
    absl::MutexLock lock(&mutex_);
    if (finish_started_) return true;
    if (now - ended_at_ < limits_.max_stall) return false;
    cutting_off_ = true;
  }
  context_->TryCancel();
  {
    absl::MutexLock lock(&mutex_);
    cutting_off_ = false;
    queue_.clear();
    queued_bytes_ = 0;
  }
  StartNext();
  return true;
}

void QueuedStream::OperationDone(bool ok) {
  {
    absl::MutexLock lock(&mutex_);
    operation_running_ = false;
    if (!ok) {
      broken_ = true;
      queue_.clear();
      queued_bytes_ = 0;
    }
  }
  StartNext();
}

void QueuedStream::OnSendInitialMetadataDone(bool ok) { OperationDone(ok); }

void QueuedStream::OnWriteDone(bool ok) { OperationDone(ok); }

void QueuedStream::OnCancel() {
  OnClientGone();
  EndNow(grpc::Status(grpc::StatusCode::CANCELLED, "the client is gone"));
}

void QueuedStream::OnDone() {
  const std::shared_ptr<QueuedStream> self = std::move(self_);  // Often the last one.
  OnOver();
}

}  // namespace writescope::server
