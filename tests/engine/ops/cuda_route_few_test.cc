// The router of few tokens in one launch against its twin, choice by choice. All values are small
// multiples of powers of two, so that logits are exact and often equal, whoever adds them up.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <tuple>

#include "engine/kernels/cuda/expert_gemm.h"
#include "engine/kernels/cuda/router_cuda.h"
#include "engine/kernels/router.h"
#include "tests/engine/ops/cuda_ops_rig.h"
#include "tests/support/gpu.h"
#include "tests/support/seed.h"

namespace writescope::ops {
namespace {

using kernels::ExpertTile;
using testing_support::TestSeed;

struct RouteCase {
  int tokens, hidden, num_experts, k, tile_slots;
  int num_groups = 1, topk_groups = 1;
};
// Experts of one thread block and of several, with a last one that is not full, of all that make a
// cluster, and of more; a token, some, as many as a tile of 8 has, one more, and all; more columns
// than the warps take at once.
constexpr RouteCase kCases[] = {
    {1, 2048, 128, 8, 8},        {8, 2048, 128, 8, 8}, {16, 2048, 128, 8, 8}, {9, 1032, 128, 8, 16},
    {1, 4096, 72, 6, 8, 4, 2},   {3, 136, 72, 32, 8},  {16, 64, 17, 17, 16},  {2, 6000, 16, 2, 8},
    {13, 2048, 120, 8, 8, 8, 3}, {1, 64, 200, 32, 8},  {16, 520, 384, 8, 8}};

std::vector<float> Multiples(int64_t count, int most, float unit, std::mt19937_64& rng) {
  std::uniform_int_distribution<int> pick(-most, most);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = static_cast<float>(pick(rng)) * unit;
  return values;
}

template <typename T>
std::vector<T> ArrayOf(CudaRig& rig, const T* from, int64_t count) {
  const std::vector<std::byte> bytes = rig.Bytes(from, count * static_cast<int64_t>(sizeof(T)));
  std::vector<T> values(static_cast<size_t>(count));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

struct Routed {
  std::vector<int32_t> experts;
  std::vector<double> weights;
};

Routed WantedOf(const kernels::RouterConfig& config, int tokens, int hidden,
                const std::vector<float>& x, const std::vector<float>& router) {
  const int k = config.experts_per_token;
  Routed want = {std::vector<int32_t>(static_cast<size_t>(tokens) * k),
                 std::vector<double>(static_cast<size_t>(tokens) * k)};
  std::vector<float> logits(config.num_experts);
  for (int t = 0; t < tokens; ++t) {
    const float* row = x.data() + int64_t{t} * hidden;
    for (int e = 0; e < config.num_experts; ++e) {
      logits[e] = std::inner_product(row, row + hidden, router.data() + int64_t{e} * hidden, 0.0f);
    }
    kernels::RouteTokenRef(config, logits.data(), &want.experts[int64_t{t} * k],
                           &want.weights[int64_t{t} * k]);
  }
  return want;
}

// Pairs by expert, those of an expert by pair, and their tiles.
void ExpectInOrder(const std::vector<int32_t>& experts, int tile_slots,
                   const std::vector<int32_t>& slot_pairs, const std::vector<ExpertTile>& tiles) {
  std::vector<int32_t> want(experts.size());
  std::iota(want.begin(), want.end(), 0);
  std::stable_sort(want.begin(), want.end(),
                   [&](int32_t a, int32_t b) { return experts[a] < experts[b]; });
  EXPECT_EQ(slot_pairs, want);
  size_t tile = 0;
  const int pairs = static_cast<int>(want.size());
  for (int slot = 0; slot < pairs; ++tile) {
    ASSERT_LT(tile, tiles.size());
    const int expert = experts[want[slot]];
    int end = slot;
    while (end < pairs && end - slot < tile_slots && experts[want[end]] == expert) ++end;
    EXPECT_EQ(std::tie(tiles[tile].expert, tiles[tile].first_slot), std::tie(expert, slot));
    EXPECT_EQ(tiles[tile].num_slots, end - slot);
    slot = end;
  }
  for (; tile < tiles.size(); ++tile) EXPECT_EQ(tiles[tile].num_slots, 0);
}

TEST(CudaRouteFew, ChoosesAndOrdersAsTheTwin) {
  SKIP_WITHOUT_GPU();
  std::mt19937_64 rng(TestSeed());
  CudaRig rig({.max_tokens = 1, .hidden = 8, .num_heads = 1, .max_head_dim = 8}, {});
  auto* arrivals = reinterpret_cast<uint32_t*>(rig.Allocate(4));
  ASSERT_EQ(cudaMemset(arrivals, 0, 4), cudaSuccess);
  // Twice over: what a launch left in shared memory must not do for what the next should write.
  for (int round = 0; round < 2; ++round) {
    for (const RouteCase& c : kCases) {
      if (testing::LeftOut(c.hidden < 1100)) continue;
      SCOPED_TRACE(std::to_string(c.tokens) + " tokens of " + std::to_string(c.hidden) + ", " +
                   std::to_string(c.num_experts) + " experts, round " + std::to_string(round));
      const std::vector<float> x = Multiples(int64_t{c.tokens} * c.hidden, 2, 0.25f, rng);
      std::vector<float> router = Multiples(int64_t{c.num_experts} * c.hidden, 1, 0.25f, rng);
      // Some experts have the logits of others, of other thread blocks too.
      for (int e = 3; e < c.num_experts; e += 5) {
        std::copy_n(router.begin() + int64_t{e * 7 % c.num_experts} * c.hidden, c.hidden,
                    router.begin() + int64_t{e} * c.hidden);
      }
      const Matrix matrix = rig.Load(router, c.num_experts, c.hidden, WeightType::kBf16);
      const int64_t pairs = int64_t{c.tokens} * c.k;
      const int64_t num_tiles = kernels::MaxExpertTiles(pairs, c.num_experts, c.tile_slots);
      const auto ints = [&](int64_t count) {
        return static_cast<int32_t*>(rig.Poisoned(count * 2));
      };
      const kernels::RouteFewArgs args = {
          .config = {.num_experts = c.num_experts,
                     .experts_per_token = c.k,
                     .renormalize = round == 0,
                     .routed_scale = 1.5f,
                     .num_groups = c.num_groups,
                     .topk_groups = c.topk_groups},
          .num_tokens = c.tokens,
          .hidden = c.hidden,
          .x = rig.Upload(x),
          .router = matrix.data,
          .router_stride = kernels::Bf16Stride(c.hidden),
          .tile_slots = c.tile_slots,
          .num_tiles = static_cast<int>(num_tiles),
          .logits = rig.Floats(int64_t{c.tokens} * c.num_experts),
          .arrivals = arrivals,
          .experts = ints(pairs),
          .weights = reinterpret_cast<float*>(ints(pairs)),
          .slot_pairs = ints(pairs),
          .tiles = reinterpret_cast<ExpertTile*>(ints(num_tiles * 4))};
      ASSERT_TRUE(kernels::RoutesFew(args));
      ASSERT_EQ(kernels::LaunchRouteFew(rig.device().compute().stream(), args), cudaSuccess);
      const Routed want = WantedOf(args.config, c.tokens, c.hidden, x, router);
      const std::vector<int32_t> experts = ArrayOf(rig, args.experts, pairs);
      EXPECT_EQ(experts, want.experts);
      const std::vector<float> weights = ArrayOf(rig, args.weights, pairs);
      for (int64_t i = 0; i < pairs; ++i) {
        EXPECT_NEAR(weights[i], want.weights[i], 2e-6 + 2e-5 * want.weights[i]) << i;
      }
      ExpectInOrder(want.experts, c.tile_slots, ArrayOf(rig, args.slot_pairs, pairs),
                    ArrayOf(rig, args.tiles, num_tiles));
    }
  }
}

}  // namespace
}  // namespace writescope::ops
