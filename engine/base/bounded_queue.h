// The queue between threads: it has a limit and an end.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <optional>
#include <utility>

#include "absl/time/time.h"
#include "engine/base/timed_wait.h"

namespace writescope {

// Thread-safe. After Close() nothing enters; what is inside can still be taken. Waiters are woken
// under the lock, so whoever took the last item may end the queue at once.
//
// On std::mutex: the thread sanitizer does not see inside the packaged Abseil, and would take what
// an absl::Mutex guards for unguarded.
template <typename T>
class BoundedQueue {
 public:
  explicit BoundedQueue(size_t limit) : limit_(limit) {}

  // False when full or closed; `item` is then left as it was.
  bool TryPush(T&& item) {
    std::lock_guard lock(mutex_);
    if (closed_ || items_.size() >= limit_) return false;
    items_.push_back(std::move(item));
    size_.store(items_.size(), std::memory_order_release);
    has_items_.notify_one();
    return true;
  }

  // Waits for room; false once closed.
  bool Push(T item) {
    std::unique_lock lock(mutex_);
    has_room_.wait(lock, [this] { return closed_ || items_.size() < limit_; });
    if (closed_) return false;
    items_.push_back(std::move(item));
    size_.store(items_.size(), std::memory_order_release);
    has_items_.notify_one();
    return true;
  }

  // Waits at most `timeout`; nothing on timeout, or when closed and empty.
  std::optional<T> Pop(absl::Duration timeout = absl::InfiniteDuration()) {
    std::unique_lock lock(mutex_);
    const auto ready = [this] { return closed_ || !items_.empty(); };
    TimedWait(has_items_, lock, timeout, ready);
    if (items_.empty()) return std::nullopt;
    std::optional<T> item(std::move(items_.front()));
    items_.pop_front();
    size_.store(items_.size(), std::memory_order_release);
    has_room_.notify_one();
    return item;
  }

  void Close() {
    std::lock_guard lock(mutex_);
    closed_ = true;
    has_items_.notify_all();
    has_room_.notify_all();
  }
  bool closed() const {
    std::lock_guard lock(mutex_);
    return closed_;
  }
  // Without the lock, so that a thread may look again and again.
  size_t size() const { return size_.load(std::memory_order_acquire); }
  bool empty() const { return size() == 0; }
  size_t limit() const { return limit_; }

 private:
  const size_t limit_;
  mutable std::mutex mutex_;
  std::condition_variable has_items_;
  std::condition_variable has_room_;
  std::deque<T> items_;          // Guarded by mutex_, like closed_.
  std::atomic<size_t> size_{0};  // Of items_
  bool closed_ = false;
};

}  // namespace writescope
