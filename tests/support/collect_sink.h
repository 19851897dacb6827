// A sink that keeps a request's whole answer, for tests.
#pragma once

#include <string>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "engine/runtime/request.h"

namespace writescope::testing {

class CollectSink final : public runtime::GenerateSink {
 public:
  bool OnEvent(runtime::GenerateEvent event) override {
    absl::MutexLock lock(&mutex_);
    text_ += event.text;
    tokens_.insert(tokens_.end(), event.tokens.begin(), event.tokens.end());
    if (event.progress.has_value()) ++progress_events_;
    events_.push_back(std::move(event));
    return accept_;
  }
  void OnDone(const absl::Status& status) override {
    absl::MutexLock lock(&mutex_);
    status_ = status;
    done_ = true;
  }

  // Whether the request ended within the time.
  bool Await(absl::Duration timeout = absl::Seconds(60)) {
    absl::MutexLock lock(&mutex_);
    return mutex_.AwaitWithTimeout(absl::Condition(&done_), timeout);
  }
  bool AwaitTokens(size_t count, absl::Duration timeout = absl::Seconds(60)) {
    absl::MutexLock lock(&mutex_);
    const auto enough = [&] { return done_ || tokens_.size() >= count; };
    return mutex_.AwaitWithTimeout(absl::Condition(&enough), timeout);
  }
  void RefuseFurtherEvents() {
    absl::MutexLock lock(&mutex_);
    accept_ = false;
  }
  absl::Status status() const {
    absl::MutexLock lock(&mutex_);
    return status_;
  }
  std::string text() const {
    absl::MutexLock lock(&mutex_);
    return text_;
  }
  std::vector<TokenId> tokens() const {
    absl::MutexLock lock(&mutex_);
    return tokens_;
  }
  std::vector<runtime::GenerateEvent> events() const {
    absl::MutexLock lock(&mutex_);
    return events_;
  }
  int progress_events() const {
    absl::MutexLock lock(&mutex_);
    return progress_events_;
  }
  // Of the last event.
  runtime::GenerateEvent last() const {
    absl::MutexLock lock(&mutex_);
    return events_.empty() ? runtime::GenerateEvent() : events_.back();
  }

 private:
  mutable absl::Mutex mutex_;
  std::string text_;
  std::vector<TokenId> tokens_;
  std::vector<runtime::GenerateEvent> events_;
  int progress_events_ = 0;
  bool accept_ = true;
  bool done_ = false;
  absl::Status status_;
};

}  // namespace writescope::testing
