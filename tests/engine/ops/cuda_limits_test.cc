// Models that the GPU's kernels do not take, told before there is a GPU.
#include <string>

#include "engine/kernels/cuda/attend_launch.h"
#include "engine/kernels/cuda/router_cuda.h"
#include "engine/ops/cuda/cuda_ops.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace writescope::ops {
namespace {

using testing::HasSubstr;

// The largest model that is taken.
OpsLimits Largest() {
  return {.max_tokens = 64,
          .hidden = 4096,
          .max_mlp_width = 1024,
          .num_experts = kernels::kMaxExpertsCuda,
          .experts_per_token = kernels::kMaxExpertsPerTokenCuda,
          .num_expert_groups = kernels::kMaxExpertGroupsCuda,
          .num_heads = 8,
          .max_head_dim = kernels::kSimtMaxDim};
}

TEST(CudaOpsLimits, OneAboveEachIsRefusedByItsNumber) {
  EXPECT_TRUE(CheckCudaOpsLimits(Largest()).ok()) << CheckCudaOpsLimits(Largest());
  struct Case {
    int OpsLimits::*field;
    std::string in_message;
  };
  for (const Case& each : {Case{&OpsLimits::num_experts, "385 experts"},
                           {&OpsLimits::experts_per_token, "33 experts for a token"},
                           {&OpsLimits::num_expert_groups, "33 groups of experts"},
                           {&OpsLimits::max_head_dim, "heads of 1025 values"}}) {
    OpsLimits limits = Largest();
    ++(limits.*each.field);
    const absl::Status status = CheckCudaOpsLimits(limits);
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(each.in_message));
  }
}

}  // namespace
}  // namespace writescope::ops
