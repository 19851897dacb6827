// The end of a gRPC stream that is read. (A template, so that this folder needs no gRPC.)
#pragma once

#include <condition_variable>
#include <mutex>
#include <thread>

#include "absl/time/time.h"
#include "engine/base/timed_wait.h"

namespace writescope {

// The status of a call whose reader.Read() has said that nothing more comes. Waits a second at most
// for it: a message that could not be parsed ends Read() too, and leaves the call open. To cancel
// the call at once would do as well, but then CANCELLED is all that one learns of why it ended.
template <typename Reader, typename Context>
auto FinishStream(Reader& reader, Context& context) {
  std::mutex mutex;
  std::condition_variable changed;
  bool finished = false;
  std::thread canceller([&] {
    std::unique_lock lock(mutex);
    if (!TimedWait(changed, lock, absl::Seconds(1), [&] { return finished; })) context.TryCancel();
  });
  auto status = reader.Finish();
  {
    const std::lock_guard lock(mutex);
    finished = true;
    changed.notify_all();
  }
  canceller.join();
  return status;
}

}  // namespace writescope
