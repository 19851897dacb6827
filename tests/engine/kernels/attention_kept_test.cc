// Sums that stay in a variant's own order from call to call.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <memory>
#include <random>
#include <span>
#include <vector>

#include "engine/base/cpu_features.h"
#include "engine/kernels/attention_partial.h"
#include "tests/engine/kernels/attention_amx_emulated.h"
#include "tests/support/attention_problems.h"
#include "tests/support/seed.h"

namespace writescope::kernels {
namespace {

using testing_support::AttentionProblem;
using testing_support::AttentionShape;
using testing_support::RandomFills;
using testing_support::RandomProblem;
using testing_support::RunningStates;
using testing_support::TestSeed;
using testing_support::TiledKv;

struct alignas(64) Kept {
  std::byte bytes[KeptState::kBytes];
};

// Calls for the same rows, cut anywhere and kept or not between them, are as one call, bit for bit.
void ExpectAsOneCall(const AttentionVariant& variant) {
  std::mt19937_64 rng(TestSeed());
  const auto kept = std::make_unique<Kept>();
  // A call for other rows in between: what a variant left on the stack must not do for what it was
  // given to keep.
  const AttentionShape other_shape{96, 96, true, KvDtype::kBf16, 16, 64};
  const AttentionProblem other = RandomProblem(other_shape, 2.0, false, rng);
  const TiledKv other_kv(other_shape, other.k, other.v, {64});
  // Latents of one panel of rows and of two, blocks seen in part, and planes.
  for (const AttentionShape& shape : {AttentionShape{96, 64, true, KvDtype::kBf16, 11, 640},
                                      AttentionShape{64, 64, true, KvDtype::kBf16, 18, 300},
                                      AttentionShape{64, 32, false, KvDtype::kBf16, 5, 300}}) {
    for (int round = 0; round < 10; ++round) {
      const AttentionProblem problem = RandomProblem(shape, 2.0, round % 2 == 0, rng);
      const TiledKv kv(shape, problem.k, problem.v, RandomFills(shape.num_tokens, rng));
      RunningStates<float> once(shape.num_rows, shape.v_dim), cut(shape.num_rows, shape.v_dim);
      variant.run(once.Args(problem, kv.blocks()));
      std::span<const KvHeadBlock> rest = kv.blocks();
      bool is_left = false;
      // What is there before something is left is not read: NaN, as bf16 and as float.
      std::memset(kept->bytes, 0xff, sizeof(kept->bytes));
      while (!rest.empty() || is_left) {
        const size_t count = rest.empty() ? 0 : rng() % (rest.size() + 1);
        AttentionPartialArgs args = cut.Args(problem, rest.first(count));
        rest = rest.subspan(count);
        // The last call may have no block: it brings the sums where they belong.
        args.kept = {.memory = kept->bytes, .is_left = is_left, .leave = rng() % 3 != 0};
        if (rest.empty() && is_left && count == 0) args.kept.leave = false;
        variant.run(args);
        is_left = args.kept.leave;
        RunningStates<float> other_rows(other_shape.num_rows, other_shape.v_dim);
        variant.run(other_rows.Args(other, other_kv.blocks()));
      }
      EXPECT_EQ(once.o(), cut.o()) << variant.name << " " << shape.Name();
      EXPECT_EQ(once.m(), cut.m()) << variant.name << " " << shape.Name();
      EXPECT_EQ(once.l(), cut.l()) << variant.name << " " << shape.Name();
    }
  }
}

TEST(AttentionKept, AnyCutIsAsOneCall) {
  for (const AttentionVariant& variant : AttentionVariants()) {
    if (variant.isa <= DetectedCpuIsa()) ExpectAsOneCall(variant);
  }
  ExpectAsOneCall(
      {"amx_emulated", CpuIsa::kGeneric, AttentionProducts::kBf16, AttentionPartialAmxEmulated});
}

}  // namespace
}  // namespace writescope::kernels
