// The queue between threads: it has a limit and an end.
#pragma once

#include <cstddef>
#include <deque>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace writescope {

// Thread-safe. After Close() nothing enters; what is inside can still be taken.
template <typename T>
class BoundedQueue {
 public:
  explicit BoundedQueue(size_t limit) : limit_(limit) {}

  // False when full or closed; `item` is then left as it was.
  bool TryPush(T&& item) {
    absl::MutexLock lock(&mutex_);
    if (closed_ || items_.size() >= limit_) return false;
    items_.push_back(std::move(item));
    return true;
  }

  // Waits for room; false once closed.
  bool Push(T item) {
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(
        +[](BoundedQueue* q) ABSL_EXCLUSIVE_LOCKS_REQUIRED(q->mutex_) {
          return q->closed_ || q->items_.size() < q->limit_;
        },
        this));
    if (closed_) return false;
    items_.push_back(std::move(item));
    return true;
  }

  // Waits at most `timeout`; nothing on timeout, or when closed and empty.
  std::optional<T> Pop(absl::Duration timeout = absl::InfiniteDuration()) {
    absl::MutexLock lock(&mutex_);
    mutex_.AwaitWithTimeout(absl::Condition(
                                +[](BoundedQueue* q) ABSL_EXCLUSIVE_LOCKS_REQUIRED(q->mutex_) {
                                  return q->closed_ || !q->items_.empty();
                                },
                                this),
                            timeout);
    if (items_.empty()) return std::nullopt;
    std::optional<T> item(std::move(items_.front()));
    items_.pop_front();
    return item;
  }

  void Close() {
    absl::MutexLock lock(&mutex_);
    closed_ = true;
  }
  bool closed() const {
    absl::MutexLock lock(&mutex_);
    return closed_;
  }
  size_t size() const {
    absl::MutexLock lock(&mutex_);
    return items_.size();
  }
  size_t limit() const { return limit_; }

 private:
  const size_t limit_;
  mutable absl::Mutex mutex_;
  std::deque<T> items_ ABSL_GUARDED_BY(mutex_);
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace writescope
