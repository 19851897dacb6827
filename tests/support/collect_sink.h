// A sink that keeps a request's whole answer, for tests.
#pragma once

#include <condition_variable>
#include <limits>
#include <mutex>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "engine/base/timed_wait.h"
#include "engine/runtime/request.h"

namespace writescope::testing {

class CollectSink final : public runtime::GenerateSink {
 public:
  bool OnEvent(runtime::GenerateEvent event) override {
    std::lock_guard lock(mutex_);
    text_ += event.text;
    tokens_.insert(tokens_.end(), event.tokens.begin(), event.tokens.end());
    if (event.progress.has_value()) ++progress_events_;
    events_.push_back(std::move(event));
    changed_.notify_all();
    return events_.size() <= num_accepted_;
  }
  void OnDone(const absl::Status& status) override {
    std::lock_guard lock(mutex_);
    status_ = status;
    done_ = true;
    changed_.notify_all();
  }

  // Whether the request ended within the time.
  bool Await(absl::Duration timeout = absl::Seconds(60)) {
    std::unique_lock lock(mutex_);
    return TimedWait(changed_, lock, timeout, [this] { return done_; });
  }
  bool AwaitTokens(size_t count, absl::Duration timeout = absl::Seconds(60)) {
    std::unique_lock lock(mutex_);
    return TimedWait(changed_, lock, timeout, [&] { return done_ || tokens_.size() >= count; });
  }
  // As a reader that is too slow from then on.
  void RefuseEventsAfter(size_t count) {
    std::lock_guard lock(mutex_);
    num_accepted_ = count;
  }
  absl::Status status() const {
    std::lock_guard lock(mutex_);
    return status_;
  }
  std::string text() const {
    std::lock_guard lock(mutex_);
    return text_;
  }
  std::vector<TokenId> tokens() const {
    std::lock_guard lock(mutex_);
    return tokens_;
  }
  std::vector<runtime::GenerateEvent> events() const {
    std::lock_guard lock(mutex_);
    return events_;
  }
  int progress_events() const {
    std::lock_guard lock(mutex_);
    return progress_events_;
  }
  // Of the last event.
  runtime::GenerateEvent last() const {
    std::lock_guard lock(mutex_);
    return events_.empty() ? runtime::GenerateEvent() : events_.back();
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::string text_;
  std::vector<TokenId> tokens_;
  std::vector<runtime::GenerateEvent> events_;
  int progress_events_ = 0;
  size_t num_accepted_ = std::numeric_limits<size_t>::max();
  bool done_ = false;
  absl::Status status_;
};

}  // namespace writescope::testing
