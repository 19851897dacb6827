#include "engine/roofline/plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/base/units.h"

namespace writescope::roofline {
namespace {

using ::testing::HasSubstr;

MachineProfile Profile(const std::string& name) {
  auto profile = ReadMachineProfile(std::string(WRITESCOPE_PROFILE_DIR "/") + name + ".json");
  EXPECT_TRUE(profile.ok()) << profile.status();
  return *profile;
}

// Qwen3-30B-A3B with 4-bit experts.
ModelShape Qwen3() {
  ModelShape shape;
  shape.name = "qwen3-30b-a3b int4";
  shape.num_layers = 48;
  shape.weight_bytes = 16800 * kMiB * 1024 / 1000;
  shape.expert_weight_bytes = 14800 * kMiB * 1024 / 1000;
  shape.num_experts = 128;
  shape.experts_per_token = 8;
  shape.kv_bytes_per_token = 98304;
  return shape;
}

DecodeRequest Request(int batch_size, int64_t context_tokens) {
  DecodeRequest request;
  request.batch_size = batch_size;
  request.context_tokens = context_tokens;
  return request;
}

TEST(PlanTest, MemoryAddsUp) {
  const auto plan = PlanMemory(Qwen3(), Profile("h200-pcie5"), Request(32, 8192));
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->kv_bytes, 24 * kGiB);
  EXPECT_EQ(plan->resident_kv_bytes + plan->spilled_kv_bytes, plan->kv_bytes);
  EXPECT_EQ(plan->weight_bytes + plan->workspace_bytes + plan->ring_bytes + plan->tail_bytes +
                plan->device_kv_bytes,
            plan->device_budget_bytes);
  EXPECT_EQ(plan->tail_bytes, int64_t{32} * 128 * 98304);
  EXPECT_TRUE(plan->fits_host);
  // Exactly as many tokens as fit do not spill.
  const auto brim =
      PlanMemory(Qwen3(), Profile("h200-pcie5"), Request(1, plan->max_resident_tokens));
  ASSERT_TRUE(brim.ok());
  EXPECT_EQ(brim->spilled_kv_bytes, 0);
  EXPECT_GT(PlanMemory(Qwen3(), Profile("h200-pcie5"), Request(1, plan->max_resident_tokens + 1))
                ->spilled_kv_bytes,
            0);
}

TEST(PlanTest, HostLimit) {
  const auto plan = PlanMemory(Qwen3(), Profile("h200-pcie5"), Request(8, 131072));
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_TRUE(plan->fits_host);
  EXPECT_GT(plan->max_context_tokens, 131072);
  const auto more =
      PlanMemory(Qwen3(), Profile("h200-pcie5"), Request(8, plan->max_context_tokens + 1));
  ASSERT_TRUE(more.ok());
  EXPECT_FALSE(more->fits_host);
  EXPECT_TRUE(
      PlanMemory(Qwen3(), Profile("h200-pcie5"), Request(8, plan->max_context_tokens))->fits_host);
}

TEST(PlanTest, DecodeSharesTheSpilledBytes) {
  const auto plan = PlanDecode(Qwen3(), Profile("h200-pcie5"), Request(128, 8192));
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_NEAR(plan->share, 0.69, 0.02);
  EXPECT_NEAR(plan->step_seconds, 0.66, 0.03);
  EXPECT_NEAR(plan->tokens_per_second, 128 / plan->step_seconds, 1e-9);
  EXPECT_NEAR(plan->stream_step_seconds / plan->step_seconds, 2.6, 0.1);
  EXPECT_GT(plan->cpu_step_seconds, plan->step_seconds);
}

TEST(PlanTest, ResidentBatchHasNoShare) {
  const auto plan = PlanDecode(Qwen3(), Profile("h200-pcie5"), Request(4, 8192));
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->memory.spilled_kv_bytes, 0);
  EXPECT_EQ(plan->share, 0);
  EXPECT_EQ(plan->step_seconds, plan->stream_step_seconds);
  EXPECT_FALSE(plan->ping_pong);
}

TEST(PlanTest, ASlowerLinkLeavesMoreToTheCpu) {
  double last_share = 0;
  double last_step = 0;
  for (const char* name : {"h200-pcie5", "a100-pcie4", "v100-pcie3"}) {
    const auto plan = PlanDecode(Qwen3(), Profile(name), Request(128, 8192));
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_GT(plan->share, last_share) << name;
    EXPECT_GT(plan->step_seconds, last_step) << name;
    last_share = plan->share;
    last_step = plan->step_seconds;
  }
}

TEST(PlanTest, DenseTimeGrowsWithTheExpertsThatABatchHits) {
  const MachineProfile profile = Profile("h200-pcie5");
  const double one = EstimateDenseSeconds(Qwen3(), profile, 1);
  const double eight = EstimateDenseSeconds(Qwen3(), profile, 8);
  const double many = EstimateDenseSeconds(Qwen3(), profile, 4096);
  EXPECT_LT(one, eight);
  EXPECT_LT(eight, many);
  EXPECT_NEAR(many, Qwen3().weight_bytes / (4.26e12 * 0.6) + 48 * 60e-6, 1e-6);
  ModelShape dense = Qwen3();
  dense.num_experts = dense.experts_per_token = 0;
  EXPECT_EQ(EstimateDenseSeconds(dense, profile, 1), EstimateDenseSeconds(dense, profile, 64));
  ModelShape given = Qwen3();
  given.dense_seconds = 0.123;
  EXPECT_EQ(PlanDecode(given, profile, Request(8, 65536))->dense_seconds, 0.123);
}

TEST(PlanTest, PingPongWinsWhereDenseWorkIsLong) {
  ModelShape shape = Qwen3();
  shape.dense_seconds = 0.06;
  const auto plan = PlanDecode(shape, Profile("h200-pcie5"), Request(32, 8192));
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_TRUE(plan->ping_pong);
  EXPECT_LT(plan->ping_pong_step_seconds, plan->step_seconds);
}

TEST(PlanTest, ErrorsCarryTheNumbers) {
  MachineProfile small = Profile("h200-pcie5");
  small.device_budget_bytes = 8 * kGiB;
  const absl::Status too_small = PlanDecode(Qwen3(), small, Request(1, 8192)).status();
  EXPECT_EQ(too_small.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(too_small.message()), HasSubstr("is 8192 MiB"));

  const auto invalid = [&](const ModelShape& shape, const DecodeRequest& request) {
    const absl::Status status = PlanDecode(shape, Profile("h200-pcie5"), request).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    return std::string(status.message());
  };
  EXPECT_THAT(invalid(Qwen3(), Request(0, 8192)), HasSubstr("batch_size is 0"));
  EXPECT_THAT(invalid(Qwen3(), Request(1, -5)), HasSubstr("context_tokens is -5"));
  EXPECT_THAT(invalid(Qwen3(), Request(65536, int64_t{1} << 31)), HasSubstr("all sequences"));
  ModelShape shape = Qwen3();
  shape.kv_bytes_per_token = 0;
  EXPECT_THAT(invalid(shape, Request(1, 1)), HasSubstr("kv_bytes_per_token is 0"));
  shape = Qwen3();
  shape.dense_seconds = -1;
  EXPECT_THAT(invalid(shape, Request(1, 1)), HasSubstr("dense_seconds is -1"));
}

}  // namespace
}  // namespace writescope::roofline
