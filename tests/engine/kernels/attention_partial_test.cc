// Every variant against plain attention, in layers; and planted bugs against the layers.
#include "engine/kernels/attention_partial.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "tests/engine/kernels/attention_amx_emulated.h"
#include "tests/support/attention_problems.h"
#include "tests/support/seed.h"

namespace writescope::kernels {
namespace {

using testing_support::AnswerDensely;
using testing_support::AttentionProblem;
using testing_support::AttentionShape;
using testing_support::AttentionShapes;
using testing_support::DenseAnswer;
using testing_support::FullFills;
using testing_support::Partials;
using testing_support::RandomFills;
using testing_support::RandomProblem;
using testing_support::RunAttention;
using testing_support::RunningStates;
using testing_support::TestSeed;
using testing_support::TiledKv;

// Layer 1: the twin, in double, with any cut and any order of merging.

double WorstError(const Partials<double>& got, const Partials<double>& want) {
  double worst = 0;
  for (size_t i = 0; i < want.lse.size(); ++i) {
    const size_t v_dim = want.out.size() / want.lse.size();
    if (std::isinf(want.lse[i])) {
      if (got.lse[i] != want.lse[i]) return std::numeric_limits<double>::infinity();
      continue;
    }
    worst = std::max(worst, std::fabs(got.lse[i] - want.lse[i]));
    for (size_t d = i * v_dim; d < (i + 1) * v_dim; ++d) {
      worst = std::max(worst, std::fabs(got.out[d] - want.out[d]));
    }
  }
  return worst;
}

TEST(AttentionPartialRef, AnyCutAndAnyOrderOfMergingEqualsNoCut) {
  std::mt19937_64 rng(TestSeed());
  for (const AttentionShape& shape : AttentionShapes()) {
    if (shape.num_tokens > 255 && shape.num_rows > 4) continue;  // Slow, and nothing new.
    const AttentionProblem problem = RandomProblem(shape, 2.0, rng() % 2 == 0, rng);
    const TiledKv kv(shape, problem.k, problem.v, RandomFills(shape.num_tokens, rng));
    std::vector<KvHeadBlock> blocks = kv.blocks();
    std::shuffle(blocks.begin(), blocks.end(), rng);
    // Some calls go on from a state, some begin a partial of their own.
    std::vector<Partials<double>> partials;
    RunningStates<double> states(shape.num_rows, shape.v_dim);
    std::span<const KvHeadBlock> rest = blocks;
    while (!rest.empty()) {
      const size_t count = 1 + rng() % rest.size();
      AttentionPartialRef(states.Args(problem, rest.first(count)));
      rest = rest.subspan(count);
      if (rng() % 2 == 0) {
        partials.push_back(states.Finish());
        states = RunningStates<double>(shape.num_rows, shape.v_dim);
      }
    }
    partials.push_back(states.Finish());
    std::shuffle(partials.begin(), partials.end(), rng);
    for (size_t i = 1; i < partials.size(); ++i) {
      for (int r = 0; r < shape.num_rows; ++r) {
        MergePartial(shape.v_dim, &partials[0].out[int64_t{r} * shape.v_dim], &partials[0].lse[r],
                     &partials[i].out[int64_t{r} * shape.v_dim], partials[i].lse[r]);
      }
    }
    EXPECT_LT(WorstError(partials[0], AnswerDensely(problem).partials), 1e-12) << shape.Name();
  }
}

// Layers 2 to 4: every variant, over all shapes.

std::string FirstFault(const RunAttention& run, const AttentionShape& shape, std::mt19937_64& rng) {
  std::string fault = FaultWithNeedles(run, shape, rng);
  if (fault.empty()) fault = FaultWithFlatScores(run, shape, rng);
  if (fault.empty()) fault = FaultWithRandomScores(run, shape, rng);
  return fault;
}

class AttentionVariantTest : public testing::TestWithParam<AttentionVariant> {
 protected:
  void SetUp() override {
    if (GetParam().isa > DetectedCpuIsa()) {
      GTEST_SKIP() << GetParam().name << ": this processor does not offer it";
    }
  }
  RunAttention run() const { return {GetParam().run, GetParam().products}; }
  std::vector<AttentionShape> shapes() const {
    std::vector<AttentionShape> shapes = AttentionShapes();
    if (GetParam().run != AttentionPartialAmxEmulated) return shapes;
    std::erase_if(shapes, [](const AttentionShape& shape) {
      const int n = shape.num_tokens, r = shape.num_rows;
      return shape.dtype == KvDtype::kF32 || r == 4 || r == 6 ||
             !(n == 0 || n == 1 || n == 64 || n == 65 || n == 130 || (n == 255 && r > 1));
    });
    return shapes;
  }
};

TEST_P(AttentionVariantTest, FindsEveryNeedle) {
  std::mt19937_64 rng(TestSeed());
  for (const AttentionShape& shape : shapes()) {
    EXPECT_EQ(FaultWithNeedles(run(), shape, rng), "");
  }
}

TEST_P(AttentionVariantTest, IsExactOnFlatScores) {
  std::mt19937_64 rng(TestSeed());
  for (const AttentionShape& shape : shapes()) {
    EXPECT_EQ(FaultWithFlatScores(run(), shape, rng), "");
  }
}

TEST_P(AttentionVariantTest, IsExactOnRandomScores) {
  std::mt19937_64 rng(TestSeed());
  for (const AttentionShape& shape : shapes()) {
    EXPECT_EQ(FaultWithRandomScores(run(), shape, rng), "");
  }
}

// Dense attention over these takes long, so they are few.
TEST_P(AttentionVariantTest, IsExactOnLongRuns) {
  if (GetParam().run == AttentionPartialAmxEmulated) return;  // 65 blocks are like 5.
  std::mt19937_64 rng(TestSeed());
  for (const AttentionShape& shape : {AttentionShape{128, 128, false, KvDtype::kBf16, 8, 4095},
                                      AttentionShape{576, 512, true, KvDtype::kBf16, 3, 4095}}) {
    EXPECT_EQ(FaultWithFlatScores(run(), shape, rng), "");
  }
}

// What comes next is fetched, and nothing else.
TEST_P(AttentionVariantTest, TheNextBlockChangesNoResult) {
  std::mt19937_64 rng(TestSeed());
  for (const bool latent : {false, true}) {
    const AttentionShape shape{96, 64, latent, KvDtype::kBf16, 18, 128};
    const AttentionProblem problem = RandomProblem(shape, 2.0, false, rng);
    const TiledKv kv(shape, problem.k, problem.v, {64, 64});
    RunningStates<float> alone(shape.num_rows, shape.v_dim), with_next(shape.num_rows, shape.v_dim);
    run()(alone.Args(problem, std::span(kv.blocks()).first(1)));
    AttentionPartialArgs args = with_next.Args(problem, std::span(kv.blocks()).first(1));
    args.next = std::span(kv.blocks()).subspan(1);
    run()(args);
    EXPECT_EQ(alone.o(), with_next.o()) << shape.Name();
    EXPECT_EQ(alone.l(), with_next.l()) << shape.Name();
  }
}

// How rows are put together in calls must not change a bit: the CPU's threads take rows as they
// come.
TEST_P(AttentionVariantTest, ARowDoesNotDependOnItsCompany) {
  std::mt19937_64 rng(TestSeed());
  for (const auto& [k_dim, v_dim, latent] :
       {std::tuple<int, int, bool>{96, 64, false}, {160, 96, true}}) {
    for (const KvDtype dtype : {KvDtype::kBf16, KvDtype::kF32}) {
      const AttentionShape shape{k_dim, v_dim, latent, dtype, 11, 333};
      const AttentionProblem problem = RandomProblem(shape, 2.0, true, rng);
      const TiledKv kv(shape, problem.k, problem.v, RandomFills(shape.num_tokens, rng));
      RunningStates<float> together(shape.num_rows, v_dim);
      run()(together.Args(problem, kv.blocks()));
      for (int r = 0; r < shape.num_rows; ++r) {
        AttentionProblem alone = problem;
        alone.shape.num_rows = 1;
        alone.q = {problem.q.begin() + r * k_dim, problem.q.begin() + (r + 1) * k_dim};
        alone.visible = {problem.visible[r]};
        RunningStates<float> states(1, v_dim);
        run()(states.Args(alone, kv.blocks()));
        EXPECT_EQ(states.m()[0], together.m()[r]) << shape.Name() << " row " << r;
        EXPECT_EQ(states.l()[0], together.l()[r]) << shape.Name() << " row " << r;
        EXPECT_EQ(0, std::memcmp(states.o().data(), &together.o()[int64_t{r} * v_dim],
                                 v_dim * sizeof(float)))
            << shape.Name() << " row " << r;
      }
    }
  }
}

// Where a variant rounds queries to bf16, a score strays by the sum of its products' errors: each
// is at most 2^-8 of its product and independent of the others, so by less than sigma * 2^-8 /
// sqrt(3) in the root of the mean square. One that rounded keys too, or cut instead of rounding, is
// off by more.
TEST_P(AttentionVariantTest, ScoresStrayByNoMoreThanTheQuerysRounding) {
  std::mt19937_64 rng(TestSeed());
  for (const bool latent : {false, true}) {
    const AttentionShape shape{128, 128, latent, KvDtype::kBf16, 16, 64};
    constexpr double kSigma = 4;
    double square_sum = 0;
    int count = 0;
    for (int i = 0; i < 16; ++i) {
      const AttentionProblem problem = RandomProblem(shape, kSigma, false, rng);
      const TiledKv kv(shape, problem.k, problem.v, {64});
      RunningStates<float> states(shape.num_rows, shape.v_dim);
      run()(states.Args(problem, kv.blocks()));
      for (int r = 0; r < shape.num_rows; ++r, ++count) {
        double best = -std::numeric_limits<double>::infinity();
        for (int t = 0; t < 64; ++t) {
          double score = 0;
          for (int d = 0; d < 128; ++d) {
            score += static_cast<double>(problem.q[r * 128 + d]) * problem.k[t * 128 + d];
          }
          best = std::max(best, score);
        }
        square_sum += (states.m()[r] - best) * (states.m()[r] - best);
      }
    }
    EXPECT_LT(std::sqrt(square_sum / count), kSigma * 0x1p-8 / std::sqrt(3.0));
  }
}

// Writes `value` into one place of a plane.
void Poke(std::byte* plane, int64_t index, KvDtype dtype, float value) {
  if (dtype == KvDtype::kBf16) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    const uint16_t half = static_cast<uint16_t>(bits >> 16);
    std::memcpy(plane + 2 * index, &half, sizeof(half));
  } else {
    std::memcpy(plane + 4 * index, &value, sizeof(value));
  }
}

TEST_P(AttentionVariantTest, NanOfAVisibleTokenIsSeenAndNoOther) {
  std::mt19937_64 rng(TestSeed());
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const bool latent : {false, true}) {
    for (const KvDtype dtype : {KvDtype::kBf16, KvDtype::kF32}) {
      for (const int bad_token : {0, 1, 20, 63}) {
        for (const bool in_key : {true, false}) {
          if (latent && !in_key) continue;
          const AttentionShape shape{64, 64, latent, dtype, 7, 64};
          AttentionProblem problem = RandomProblem(shape, 1.0, false, rng);
          // Rows that see up to just before, up to, and beyond the bad token.
          problem.visible = {bad_token, bad_token + 1, bad_token, 64, bad_token + 1, bad_token, 64};
          TiledKv kv(shape, problem.k, problem.v, {64});
          const int values = KvWordValues(dtype);
          if (in_key) {
            Poke(kv.k_plane(0), KIndex(bad_token, 5, 64, values), dtype, nan);
          } else {
            Poke(kv.v_plane(0), VIndex(bad_token, 5, 64, values), dtype, nan);
          }
          RunningStates<float> states(shape.num_rows, shape.v_dim);
          run()(states.Args(problem, kv.blocks()));
          const Partials<float> got = states.Finish();
          for (int r = 0; r < shape.num_rows; ++r) {
            const bool sees = problem.visible[r] > bad_token;
            EXPECT_EQ(std::isnan(got.out[r * 64 + 5]), sees)
                << shape.Name() << " token " << bad_token << " row " << r;
            if (in_key) {
              EXPECT_EQ(std::isnan(got.lse[r]), sees);
            }
          }
        }
      }
    }
  }
}

// Slots past the end hold zeros by contract; the kernels do not even rely on that.
TEST_P(AttentionVariantTest, SlotsPastTheEndDoNotContribute) {
  std::mt19937_64 rng(TestSeed());
  for (const bool latent : {false, true}) {
    for (const KvDtype dtype : {KvDtype::kBf16, KvDtype::kF32}) {
      for (const int num_tokens : {1, 15, 16, 33, 63}) {
        const AttentionShape shape{64, 64, latent, dtype, 5, num_tokens};
        const AttentionProblem problem = RandomProblem(shape, 1.0, false, rng);
        TiledKv kv(shape, problem.k, problem.v, {num_tokens});
        RunningStates<float> clean(shape.num_rows, shape.v_dim);
        run()(clean.Args(problem, kv.blocks()));
        const int values = KvWordValues(dtype);
        for (int t = num_tokens; t < kBlockTokens; ++t) {
          for (int d = 0; d < 64; ++d) {
            Poke(kv.k_plane(0), KIndex(t, d, 64, values), dtype, t % 2 == 0 ? NAN : INFINITY);
            if (!latent) Poke(kv.v_plane(0), VIndex(t, d, 64, values), dtype, NAN);
          }
        }
        RunningStates<float> stale(shape.num_rows, shape.v_dim);
        run()(stale.Args(problem, kv.blocks()));
        EXPECT_EQ(clean.o(), stale.o()) << shape.Name();
        EXPECT_EQ(clean.m(), stale.m()) << shape.Name();
        EXPECT_EQ(clean.l(), stale.l()) << shape.Name();
      }
    }
  }
}

TEST_P(AttentionVariantTest, NothingSeenLeavesTheStateAsItWas) {
  std::mt19937_64 rng(TestSeed());
  const AttentionShape shape{32, 32, false, KvDtype::kBf16, 3, 64};
  AttentionProblem problem = RandomProblem(shape, 1.0, false, rng);
  const TiledKv kv(shape, problem.k, problem.v, {64});
  RunningStates<float> states(shape.num_rows, shape.v_dim);
  run()(states.Args(problem, {}));
  problem.visible = {0, -5, 0};
  run()(states.Args(problem, kv.blocks()));
  const Partials<float> empty = states.Finish();
  for (const float lse : empty.lse) EXPECT_EQ(lse, kEmptyLse);
  for (const float value : empty.out) EXPECT_EQ(value, 0.0f);
  problem.visible.clear();
  run()(states.Args(problem, kv.blocks()));
  const std::vector<float> o_before = states.o();
  const std::vector<float> l_before = states.l();
  problem.visible = {0, 0, 0};
  run()(states.Args(problem, kv.blocks()));
  EXPECT_EQ(o_before, states.o());
  EXPECT_EQ(l_before, states.l());
}

TEST_P(AttentionVariantTest, ScoresThatAreInfinitelyLowWeighNothing) {
  AttentionShape shape{32, 32, false, KvDtype::kF32, 1, 20};
  std::mt19937_64 rng(TestSeed());
  AttentionProblem problem = RandomProblem(shape, 1.0, false, rng);
  for (int d = 0; d < 32; ++d) problem.q[d] = d == 0 ? 1.0f : 0.0f;
  for (int t = 0; t < 20; ++t) problem.k[t * 32] = -INFINITY;
  const TiledKv all_low(shape, problem.k, problem.v, {20});
  RunningStates<float> states(1, 32);
  run()(states.Args(problem, all_low.blocks()));
  EXPECT_EQ(states.Finish().lse[0], kEmptyLse);
  problem.k[7 * 32] = 3.0f;
  const TiledKv one_seen(shape, problem.k, problem.v, {20});
  run()(states.Args(problem, one_seen.blocks()));
  const Partials<float> got = states.Finish();
  EXPECT_EQ(got.lse[0], 3.0f);
  for (int d = 0; d < 32; ++d) EXPECT_EQ(got.out[d], problem.v[7 * 32 + d]);
}

// Planted bugs: a check that passes a wrong kernel would be worth nothing.

TEST_P(AttentionVariantTest, ALostTokenIsFound) {
  std::mt19937_64 rng(TestSeed());
  const RunAttention right = run();
  const RunAttention loses_one(
      [&](const AttentionPartialArgs& args) {
        std::vector<KvHeadBlock> blocks(args.blocks.begin(), args.blocks.end());
        for (KvHeadBlock& block : blocks) block.num_tokens = std::max(0, block.num_tokens - 1);
        AttentionPartialArgs wrong = args;
        wrong.blocks = blocks;
        right(wrong);
      },
      right.products);
  for (const AttentionShape& shape : shapes()) {
    if (shape.num_tokens == 0) continue;
    EXPECT_NE(FaultWithFlatScores(loses_one, shape, rng), "") << shape.Name();
    if (shape.num_tokens > 64) continue;
    EXPECT_NE(FaultWithNeedles(loses_one, shape, rng), "") << shape.Name();
  }
}

TEST_P(AttentionVariantTest, ASwappedPairOfTokensIsFound) {
  std::mt19937_64 rng(TestSeed());
  const RunAttention right = run();
  for (const KvDtype dtype : {KvDtype::kBf16, KvDtype::kF32}) {
    const int values = KvWordValues(dtype);
    const int bytes = KvDtypeBytes(dtype);
    for (const int num_tokens : {2, 17, 64, 255}) {
      const AttentionShape shape{64, 64, false, dtype, 4, num_tokens};
      const RunAttention swaps(
          [&](const AttentionPartialArgs& args) {
            // Tokens 0 and 1 of each block change places in V, not in K.
            std::vector<KvHeadBlock> blocks(args.blocks.begin(), args.blocks.end());
            std::vector<std::vector<std::byte>> planes;
            for (KvHeadBlock& block : blocks) {
              planes.emplace_back(block.v, block.v + 64 * 64 * bytes);
              for (int d = 0; d < 64 && block.num_tokens > 1; ++d) {
                std::swap_ranges(&planes.back()[VIndex(0, d, 64, values) * bytes],
                                 &planes.back()[VIndex(0, d, 64, values) * bytes] + bytes,
                                 &planes.back()[VIndex(1, d, 64, values) * bytes]);
              }
              block.v = planes.back().data();
            }
            AttentionPartialArgs wrong = args;
            wrong.blocks = blocks;
            right(wrong);
          },
          right.products);
      EXPECT_NE(FirstFault(swaps, shape, rng), "") << shape.Name();
    }
  }
}

// Within a whole block, which some variants treat apart: one token twice, and another not at all.
TEST_P(AttentionVariantTest, ATokenInPlaceOfAnotherIsFound) {
  std::mt19937_64 rng(TestSeed());
  const RunAttention right = run();
  for (const bool latent : {false, true}) {
    for (const KvDtype dtype : {KvDtype::kBf16, KvDtype::kF32}) {
      const AttentionShape shape{96, 64, latent, dtype, 8, 64};
      const int values = KvWordValues(dtype), bytes = KvDtypeBytes(dtype);
      for (const int lost : {0, 31, 46, 63}) {
        const RunAttention doubles(
            [&](const AttentionPartialArgs& args) {
              std::vector<KvHeadBlock> blocks(args.blocks.begin(), args.blocks.end());
              std::vector<std::vector<std::byte>> planes;
              for (KvHeadBlock& block : blocks) {
                auto& k = planes.emplace_back(block.k, block.k + 64 * 96 * bytes);
                for (int d = 0; d < 96; ++d) {
                  std::memcpy(&k[KIndex(lost, d, 96, values) * bytes],
                              &k[KIndex(lost ^ 1, d, 96, values) * bytes], bytes);
                }
                block.k = k.data();
                if (latent) continue;
                auto& v = planes.emplace_back(block.v, block.v + 64 * 64 * bytes);
                for (int d = 0; d < 64; ++d) {
                  std::memcpy(&v[VIndex(lost, d, 64, values) * bytes],
                              &v[VIndex(lost ^ 1, d, 64, values) * bytes], bytes);
                }
                block.v = v.data();
              }
              AttentionPartialArgs wrong = args;
              wrong.blocks = blocks;
              right(wrong);
            },
            right.products);
        // Tokens are cut into blocks at random, and a short one has no such token.
        bool by_needles = false, by_flat_scores = false;
        for (int tries = 0; tries < 8; ++tries) {
          by_needles |= !FaultWithNeedles(doubles, shape, rng).empty();
          by_flat_scores |= !FaultWithFlatScores(doubles, shape, rng).empty();
        }
        EXPECT_TRUE(by_needles) << shape.Name() << " token " << lost;
        EXPECT_TRUE(by_flat_scores) << shape.Name() << " token " << lost;
      }
    }
  }
}

TEST_P(AttentionVariantTest, ATileCountedBeyondItsTokensIsFound) {
  std::mt19937_64 rng(TestSeed());
  const RunAttention right = run();
  const RunAttention counts_whole_tiles(
      [&](const AttentionPartialArgs& args) {
        std::vector<KvHeadBlock> blocks(args.blocks.begin(), args.blocks.end());
        for (KvHeadBlock& block : blocks) {
          block.num_tokens = (block.num_tokens + kTileTokens - 1) / kTileTokens * kTileTokens;
        }
        AttentionPartialArgs wrong = args;
        wrong.blocks = blocks;
        right(wrong);
      },
      right.products);
  for (const AttentionShape& shape : shapes()) {
    if (shape.num_tokens % kTileTokens == 0) continue;
    EXPECT_NE(FirstFault(counts_whole_tiles, shape, rng), "") << shape.Name();
  }
}

TEST_P(AttentionVariantTest, ARowThatSeesOneTokenTooManyIsFound) {
  std::mt19937_64 rng(TestSeed());
  const RunAttention right = run();
  const RunAttention sees_too_far(
      [&](const AttentionPartialArgs& args) {
        if (args.visible == nullptr) return right(args);
        std::vector<int64_t> visible(args.visible, args.visible + args.num_rows);
        for (int64_t& limit : visible) ++limit;
        AttentionPartialArgs wrong = args;
        wrong.visible = visible.data();
        right(wrong);
      },
      right.products);
  for (const AttentionShape& shape : shapes()) {
    // With one row, or next to no tokens, the mask may hide nothing.
    if (shape.num_tokens < 63 || shape.num_rows < 4) continue;
    EXPECT_NE(FaultWithFlatScores(sees_too_far, shape, rng), "") << shape.Name();
  }
}

std::vector<AttentionVariant> TestedVariants() {
  std::vector<AttentionVariant> variants(AttentionVariants().begin(), AttentionVariants().end());
  variants.push_back(
      {"amx_emulated", CpuIsa::kGeneric, AttentionProducts::kBf16, AttentionPartialAmxEmulated});
  return variants;
}

INSTANTIATE_TEST_SUITE_P(All, AttentionVariantTest, testing::ValuesIn(TestedVariants()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(AttentionVariants, TheActiveOneIsThatOfTheActiveInstructionSet) {
  const bool is_slow =
      ActiveCpuIsa() == CpuIsa::kAvx512Bf16 && !HasFastBf16Products() && !IsCpuIsaForced();
  EXPECT_EQ(ActiveAttentionVariant(AttentionProducts::kBf16).isa,
            is_slow ? CpuIsa::kAvx512 : ActiveCpuIsa());
  EXPECT_EQ(ActiveAttentionVariant().isa, std::min(ActiveCpuIsa(), CpuIsa::kAvx512));
  EXPECT_EQ(ActiveAttentionVariant().products, AttentionProducts::kF32);
  EXPECT_LE(ActiveAttentionVariant().isa, DetectedCpuIsa());
}

}  // namespace
}  // namespace writescope::kernels
