#include "engine/device/cpu/thread_queue.h"

#include <sys/prctl.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <ctime>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/base/timed_wait.h"

namespace writescope::device {
namespace {

// Longest wait for another queue's event. Only a stalled queue takes this long; the step that waits
// has given up long before by its own limit.
constexpr absl::Duration kEventWaitLimit = absl::Seconds(30);

void SleepUntil(double seconds) {
  timespec until;
  until.tv_sec = static_cast<time_t>(std::floor(seconds));
  until.tv_nsec = static_cast<long>((seconds - std::floor(seconds)) * 1e9);
  clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, nullptr);
}

}  // namespace

ThreadQueue::ThreadQueue(std::string name, const std::atomic<double>* pace)
    : name_(std::move(name)), pace_(pace), thread_([this] { Run(); }) {}

ThreadQueue::~ThreadQueue() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  submitted_.notify_one();
  thread_.join();
}

void ThreadQueue::Launch(std::function<void()> work) {
  {
    std::lock_guard lock(mutex_);
    work_.push_back(std::move(work));
    ++last_ticket_;
  }
  submitted_.notify_one();
}

Event ThreadQueue::Record() {
  std::lock_guard lock(mutex_);
  return Event{this, last_ticket_};
}

void ThreadQueue::WaitFor(Event event) {
  if (event.queue == this || event.Done()) return;
  Launch([this, event] {
    if (absl::Status status = event.Wait(kEventWaitLimit); !status.ok()) SetError(status);
    not_before_s_ = NowSeconds();
  });
}

void ThreadQueue::Copy(std::byte* to, const std::byte* from, int64_t size_bytes) {
  const double submitted_s = NowSeconds();
  Launch([=, this] { PacedCopy(to, from, size_bytes, submitted_s); });
}

void ThreadQueue::Zero(std::byte* to, int64_t size_bytes) {
  Launch([=] { std::memset(to, 0, static_cast<size_t>(size_bytes)); });
}

void ThreadQueue::ZeroRows(std::byte* to, int64_t row_bytes, int64_t stride_bytes,
                           int64_t num_rows) {
  Launch([=] {
    for (int64_t row = 0; row < num_rows; ++row) {
      std::memset(to + row * stride_bytes, 0, static_cast<size_t>(row_bytes));
    }
  });
}

void ThreadQueue::RecordTime(double* seconds) {
  Launch([seconds] { *seconds = NowSeconds(); });
}

void ThreadQueue::SetFlag(std::atomic<uint64_t>* flag, uint64_t value) {
  Launch([=] { flag->store(value, std::memory_order_release); });
}

void ThreadQueue::WaitFlag(const std::atomic<uint64_t>* flag, uint64_t value,
                           absl::Duration timeout, WaitTimes* times) {
  Launch([=, this] {
    const double began_s = NowSeconds();
    AwaitFlag(*flag, value, timeout);
    if (times != nullptr) *times = {.began_s = began_s, .seen_s = NowSeconds()};
  });
}

void ThreadQueue::AwaitFlag(const std::atomic<uint64_t>& flag, uint64_t value,
                            absl::Duration timeout) {
  // One wait that ran out has failed the step already; the next would only take as long again.
  if (failed()) return;
  WaitLimit limit(timeout, NowSeconds());
  for (int spin = 0; flag.load(std::memory_order_acquire) < value; ++spin) {
    if (spin < 200) {
      __builtin_ia32_pause();
      continue;
    }
    const double now = NowSeconds();
    if (limit.Passed(now)) {
      SetError(absl::DeadlineExceededError(
          absl::StrCat("queue ", name_, " waited ", absl::FormatDuration(timeout),
                       " for the CPU's part of attention, which did not come")));
      return;
    }
    SleepUntil(now + 10e-6);
  }
}

absl::Status ThreadQueue::WaitTicket(uint64_t ticket, absl::Duration timeout) const {
  if (completed_ticket() >= ticket) return absl::OkStatus();
  const auto reached = [&] { return completed_ticket() >= ticket; };
  std::unique_lock lock(mutex_);
  if (!TimedWait(done_, lock, timeout, reached)) {
    return absl::DeadlineExceededError(absl::StrCat("queue ", name_, " did not reach ticket ",
                                                    ticket, " in ", absl::FormatDuration(timeout),
                                                    "; it is at ", completed_ticket()));
  }
  return absl::OkStatus();
}

absl::Status ThreadQueue::TakeError() {
  std::lock_guard lock(mutex_);
  failed_.store(false, std::memory_order_release);
  return std::exchange(error_, absl::OkStatus());
}

void ThreadQueue::SetError(absl::Status status) {
  std::lock_guard lock(mutex_);
  if (error_.ok()) error_ = std::move(status);
  failed_.store(true, std::memory_order_release);
}

void ThreadQueue::PacedCopy(std::byte* to, const std::byte* from, int64_t size_bytes,
                            double submitted_s) {
  std::memcpy(to, from, static_cast<size_t>(size_bytes));
  const double pace = pace_ == nullptr ? 0 : pace_->load(std::memory_order_relaxed);
  if (pace <= 0) return;
  // The link begins when the copy was there and the one before was through, not when this thread
  // happens to wake: so late wake-ups do not add up, and an idle link saves up nothing.
  link_free_at_s_ = std::max({link_free_at_s_, submitted_s, not_before_s_});
  link_free_at_s_ += static_cast<double>(size_bytes) / pace;
  if (link_free_at_s_ > NowSeconds()) SleepUntil(link_free_at_s_);
}

void ThreadQueue::Run() {
  prctl(PR_SET_TIMERSLACK, 1000UL);  // Nanoseconds; the default of 50 us would round every pace.
  std::unique_lock lock(mutex_);
  while (true) {
    submitted_.wait(lock, [&] { return stop_ || !work_.empty(); });
    if (work_.empty()) return;
    std::function<void()> work = std::move(work_.front());
    work_.pop_front();
    lock.unlock();
    work();
    work = nullptr;  // What it captured dies before the ticket is done.
    lock.lock();
    completed_.fetch_add(1, std::memory_order_release);
    done_.notify_all();
  }
}

}  // namespace writescope::device
