// Several KV heads in one call of a variant.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <random>
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
using testing_support::FullFills;
using testing_support::RandomProblem;
using testing_support::RunningStates;
using testing_support::TestSeed;
using testing_support::TiledKv;

// Heads that take turns in one call are as if each had a call of its own.
void ExpectHeadsApart(const AttentionVariant& variant) {
  std::mt19937_64 rng(TestSeed());
  // Few rows of narrow keys, many rows, and keys too wide for the queries of all heads to be kept.
  for (const AttentionShape& shape : {AttentionShape{64, 64, false, KvDtype::kBf16, 4, 192},
                                      AttentionShape{64, 32, false, KvDtype::kBf16, 19, 150},
                                      AttentionShape{576, 96, true, KvDtype::kBf16, 3, 128},
                                      AttentionShape{64, 64, false, KvDtype::kF32, 5, 130}}) {
    constexpr int kHeads = 3;
    std::vector<AttentionProblem> problems;
    std::vector<TiledKv> kv;
    std::vector<RunningStates<float>> alone, together;
    AttentionPartialArgs args;
    std::vector<const float*> q;
    std::vector<float*> o, m, l;
    std::vector<int64_t> visible;
    for (int head = 0; head < kHeads; ++head) {
      problems.push_back(RandomProblem(shape, 2.0, true, rng));
      kv.emplace_back(shape, problems[head].k, problems[head].v, FullFills(shape.num_tokens));
      alone.emplace_back(shape.num_rows, shape.v_dim);
      together.emplace_back(shape.num_rows, shape.v_dim);
      variant.run(alone[head].Args(problems[head], kv[head].blocks()));
    }
    for (int head = 0; head < kHeads; ++head) {
      args = together[head].Args(problems[head], {});
      q.insert(q.end(), args.q, args.q + shape.num_rows);
      o.insert(o.end(), args.o, args.o + shape.num_rows);
      m.insert(m.end(), args.m, args.m + shape.num_rows);
      l.insert(l.end(), args.l, args.l + shape.num_rows);
      visible.insert(visible.end(), args.visible, args.visible + shape.num_rows);
    }
    std::vector<KvHeadBlock> blocks;
    for (size_t i = 0; i < kv[0].blocks().size(); ++i) {
      for (int head = 0; head < kHeads; ++head) blocks.push_back(kv[head].blocks()[i]);
    }
    args.blocks = blocks;
    args.num_heads = kHeads;
    args.q = q.data();
    args.o = o.data();
    args.m = m.data();
    args.l = l.data();
    args.visible = visible.data();
    variant.run(args);
    for (int head = 0; head < kHeads; ++head) {
      EXPECT_EQ(alone[head].o(), together[head].o())
          << variant.name << " " << shape.Name() << " head " << head;
      EXPECT_EQ(alone[head].m(), together[head].m())
          << variant.name << " " << shape.Name() << " head " << head;
      EXPECT_EQ(alone[head].l(), together[head].l())
          << variant.name << " " << shape.Name() << " head " << head;
    }
  }
}

TEST(AttentionHeads, OfOneCallDoNotMeet) {
  for (const AttentionVariant& variant : AttentionVariants()) {
    if (variant.isa <= DetectedCpuIsa()) ExpectHeadsApart(variant);
  }
  ExpectHeadsApart(
      {"amx_emulated", CpuIsa::kGeneric, AttentionProducts::kBf16, AttentionPartialAmxEmulated});
}

}  // namespace
}  // namespace writescope::kernels
