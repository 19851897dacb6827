// The ring of the experts' products where its stages are filled again and again: each shape of it,
// against the plain kernel.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "engine/base/bf16.h"
#include "engine/kernels/cuda/expert_gemm.h"
#include "tests/engine/ops/cuda_ops_rig.h"
#include "tests/support/gpu.h"
#include "tests/support/seed.h"

namespace writescope::ops {
namespace {

using kernels::ExpertGemmArgs;
using kernels::ExpertKernel;
using kernels::ExpertTile;
using testing_support::TestSeed;

struct RingCase {
  int rows, cols;
  bool gated;
  int experts, slots_per_expert;
  int tile_slots;
};

// More groups of columns than the stages hold, or more units of work than thread blocks.
constexpr RingCase kCases[] = {
    {.rows = 576,
     .cols = 1152,
     .gated = true,
     .experts = 16,
     .slots_per_expert = 5,
     .tile_slots = 8},
    {.rows = 1152,
     .cols = 1152,
     .gated = false,
     .experts = 16,
     .slots_per_expert = 1,
     .tile_slots = 8},
    {.rows = 64, .cols = 3200, .gated = true, .experts = 2, .slots_per_expert = 8, .tile_slots = 8},
    {.rows = 128,
     .cols = 3200,
     .gated = false,
     .experts = 2,
     .slots_per_expert = 3,
     .tile_slots = 8},
    {.rows = 576,
     .cols = 896,
     .gated = true,
     .experts = 16,
     .slots_per_expert = 2,
     .tile_slots = 8},
    {.rows = 64,
     .cols = 3200,
     .gated = true,
     .experts = 2,
     .slots_per_expert = 12,
     .tile_slots = 16},
    {.rows = 576,
     .cols = 640,
     .gated = true,
     .experts = 16,
     .slots_per_expert = 16,
     .tile_slots = 16},
    // Stages with all groups of columns: the quants of a unit are one copy.
    {.rows = 1152,
     .cols = 768,
     .gated = false,
     .experts = 16,
     .slots_per_expert = 3,
     .tile_slots = 8},
    {.rows = 128,
     .cols = 1024,
     .gated = false,
     .experts = 2,
     .slots_per_expert = 8,
     .tile_slots = 8},
    {.rows = 128,
     .cols = 512,
     .gated = false,
     .experts = 2,
     .slots_per_expert = 11,
     .tile_slots = 16},
};

// Any quants are weights; scales have one size, so that no group is lost among the others.
std::byte* RandomInt4(CudaRig& rig, const RingCase& c, std::mt19937_64& rng) {
  const int64_t size_bytes = kernels::Int4Bytes(c.rows, c.cols);
  const int64_t quant_bytes = kernels::Int4QuantBytes(c.rows, c.cols);
  std::vector<std::byte> packed(static_cast<size_t>(c.experts * size_bytes));
  for (size_t i = 0; i < packed.size(); i += 8) {
    const uint64_t bits = rng();
    std::memcpy(&packed[i], &bits, 8);
  }
  std::uniform_real_distribution<float> scale(0.5f, 1);
  for (int e = 0; e < c.experts; ++e) {
    for (int64_t at = quant_bytes; at < size_bytes; at += 2) {
      const uint16_t value = FloatToBf16(scale(rng) / 64);
      std::memcpy(&packed[e * size_bytes + at], &value, 2);
    }
  }
  std::byte* to = rig.Allocate(static_cast<int64_t>(packed.size()));
  CHECK(cudaMemcpy(to, packed.data(), packed.size(), cudaMemcpyHostToDevice) == cudaSuccess);
  return to;
}

TEST(CudaExpertRing, GivesWhatThePlainKernelDoesWhereStagesAreFilledAgain) {
  SKIP_WITHOUT_GPU();
  std::mt19937_64 rng(TestSeed());
  CudaRig rig({.max_tokens = 1, .hidden = 8, .num_heads = 1, .max_head_dim = 8},
              {.compute = ComputeType::kBf16});
  for (const RingCase& c : kCases) {
    if (testing::LeftOut(c.experts == 2)) continue;
    SCOPED_TRACE(std::to_string(c.rows) + " x " + std::to_string(c.cols) + ", " +
                 std::to_string(c.tile_slots));
    if (!kernels::CanRun(ExpertKernel::kRing,
                         {kernels::ExpertWeights::kInt4, c.rows, c.cols, c.gated})) {
      GTEST_SKIP() << "not on this GPU";
    }
    const int slots = c.experts * c.slots_per_expert;
    std::vector<ExpertTile> tiles;
    std::vector<int32_t> pairs;
    for (int e = 0; e < c.experts; ++e) {
      tiles.push_back(
          {.expert = e, .first_slot = e * c.slots_per_expert, .num_slots = c.slots_per_expert});
    }
    for (int slot = 0; slot < slots; ++slot) pairs.push_back(slot);
    const auto upload = [&](const auto& values) {
      const size_t bytes = values.size() * sizeof(values[0]);
      std::byte* to = rig.Allocate(static_cast<int64_t>(bytes));
      CHECK(cudaMemcpy(to, values.data(), bytes, cudaMemcpyHostToDevice) == cudaSuccess);
      return to;
    };
    ExpertGemmArgs args = {.weights = kernels::ExpertWeights::kInt4,
                           .rows = c.rows,
                           .cols = c.cols,
                           .w = RandomInt4(rig, c, rng),
                           .up = c.gated ? RandomInt4(rig, c, rng) : nullptr,
                           .expert_stride_bytes = kernels::Int4Bytes(c.rows, c.cols),
                           .tiles = reinterpret_cast<const ExpertTile*>(upload(tiles)),
                           .num_tiles = c.experts,
                           .slot_pairs = reinterpret_cast<const int32_t*>(upload(pairs)),
                           .x = rig.Upload(Bf16Values(int64_t{slots} * c.cols, 0.2f, rng)),
                           .x_stride = c.cols,
                           .y_stride = c.rows};
    const int64_t count = int64_t{slots} * c.rows;
    const auto run = [&](ExpertKernel kernel) {
      void* y = rig.Poisoned(count);
      args.y = y;
      EXPECT_EQ(kernels::LaunchExpertGemm(rig.device().compute().stream(),
                                          kernels::ValueType::kBf16, {kernel, c.tile_slots}, args),
                cudaSuccess);
      return rig.Download(y, count);
    };
    const std::vector<float> want = run(ExpertKernel::kSimt);
    const auto expect_near = [&](const std::vector<float>& got) {
      double square = 0;
      for (const float value : want) square += double{value} * value;
      // Either rounds to bf16 once, and sums in float32 in its own order.
      const double floor = 1e-3 * std::sqrt(square / static_cast<double>(count));
      int64_t wrong = 0;
      for (int64_t i = 0; i < count; ++i) {
        wrong += !(std::abs(got[i] - want[i]) <= std::abs(want[i]) / 100 + floor);
      }
      EXPECT_EQ(wrong, 0);
    };
    expect_near(run(ExpertKernel::kRing));
    // With the first weights fetched ahead of the values.
    args.tiles_settled = true;
    expect_near(run(ExpertKernel::kRing));
  }
}

}  // namespace
}  // namespace writescope::ops
