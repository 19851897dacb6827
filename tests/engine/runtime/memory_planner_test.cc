// What fits and what does not is told before memory is taken.
#include "engine/runtime/memory_planner.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/base/cpu_features.h"
#include "engine/base/units.h"
#include "tests/support/demo_engine.h"

namespace writescope::runtime {
namespace {

using ::testing::AllOf;
using testing::DemoOptions;
using ::testing::HasSubstr;

TEST(MemoryPlannerTest, AHostBudgetOneByteShortSaysHowMuchIsMissing) {
  EngineOptions options = DemoOptions();
  const auto plan = Engine::Plan(options);
  ASSERT_TRUE(plan.ok()) << plan.status();
  options.host_budget_bytes = 0;
  for (const MemoryPlan::Item& item : plan->items) {
    if (!item.on_device && !item.name.starts_with("KV region")) {
      options.host_budget_bytes += item.size_bytes;
    }
  }
  const auto least = Engine::Plan(options);
  ASSERT_TRUE(least.ok()) << least.status();
  EXPECT_EQ(least->host_kv_tokens, 0);
  EXPECT_LE(least->host_total_bytes, least->host_budget_bytes);
  --options.host_budget_bytes;
  const absl::Status status = Engine::Plan(options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("a host budget of"), HasSubstr("too small by 0.1 MiB"),
                    HasSubstr("--host-budget")));
}

TEST(MemoryPlannerTest, APlanIsHeldToWhatTheMachineAllows) {
  const MemoryPlan plan = {.device_total_bytes = 3 * kGiB, .host_total_bytes = 5 * kGiB};
  EXPECT_TRUE(CheckFitsMachine(plan, DeviceKind::kCuda, 5 * kGiB).ok());
  EXPECT_TRUE(CheckFitsMachine(plan, DeviceKind::kCpu, 8 * kGiB).ok());
  const absl::Status cuda = CheckFitsMachine(plan, DeviceKind::kCuda, 5 * kGiB - 1);
  EXPECT_EQ(cuda.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(cuda.message()),
              AllOf(HasSubstr("takes 5120.0 MiB"), HasSubstr("0.1 MiB less"),
                    HasSubstr("--host-budget"), ::testing::Not(HasSubstr("--vram-budget"))));
  const absl::Status cpu = CheckFitsMachine(plan, DeviceKind::kCpu, 8 * kGiB - 1);
  EXPECT_EQ(cpu.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(cpu.message()),
              AllOf(HasSubstr("takes 8192.0 MiB"), HasSubstr("--vram-budget")));
}

TEST(MemoryPlannerTest, AnEngineLargerThanTheMachineIsNotMade) {
  EngineOptions options = DemoOptions();
  options.kv_dtype = KvDtype::kF32;
  options.max_sequences = 4096;
  options.vram_budget_bytes = int64_t{1} << 50;
  options.host_budget_bytes = int64_t{1} << 50;
  const auto plan = Engine::Plan(options);  // It may be for another machine.
  ASSERT_TRUE(plan.ok()) << plan.status();
  if (plan->device_total_bytes + plan->host_total_bytes <= UsableHostMemoryBytes()) {
    GTEST_SKIP() << "a machine that holds it";
  }
  const absl::Status status = Engine::Create(options, nullptr).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("cgroup and machine allow")) << status;
}

}  // namespace
}  // namespace writescope::runtime
