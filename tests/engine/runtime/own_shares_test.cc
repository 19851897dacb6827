// The shares that hold without a controller follow the engine's steps. What they follow, and how
// near, is in step_model_test.cc and tests/sim/own_shares_test.cc.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "engine/runtime/engine.h"
#include "tests/support/demo_engine.h"

namespace writescope::runtime {
namespace {

using testing::kDemo;
using testing::RunToEnd;
using testing::TextRequest;

// As it starts on a machine on which others have every core.
std::unique_ptr<Engine> MakeOnBusyMachine(const EngineOptions& options) {
  std::atomic<bool> stop = false;
  std::vector<std::thread> others;
  for (unsigned i = 0; i < 2 * std::thread::hardware_concurrency(); ++i) {
    others.emplace_back([&stop] {
      while (!stop.load(std::memory_order_relaxed)) {
      }
    });
  }
  std::unique_ptr<Engine> engine = testing::MakeEngine(options);
  stop.store(true);
  for (std::thread& other : others) other.join();
  return engine;
}

TEST(EngineShares, FollowItsSteps) {
  EngineOptions options = testing::DemoOptions();
  options.max_sequences = 1;
  options.retention = false;
  // Slow enough for dense work to matter.
  options.link_bytes_per_s = 200e6;
  const auto engine = MakeOnBusyMachine(options);
  ASSERT_NE(engine, nullptr);
  const roofline::ShareTable at_start = engine->share().table;
  const std::string text = testing::ReadText(kDemo + "/prose.txt").substr(0, 9000);
  for (int i = 0; i < 100 && engine->share().table == at_start; ++i) {
    GenerateRequest request = TextRequest(text, 64);
    request.stopping.ignore_eos = true;
    const auto sink = RunToEnd(*engine, std::move(request));
    ASSERT_TRUE(sink->status().ok()) << sink->status();
  }
  EXPECT_NE(engine->share().table, at_start);
  EXPECT_EQ(engine->share().generation, 0);
}

}  // namespace
}  // namespace writescope::runtime
