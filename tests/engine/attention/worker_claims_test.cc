#include "engine/attention/worker_claims.h"

#include <gtest/gtest.h>

namespace writescope::attention {
namespace {

// Sequences of 6, 1 and 5 blocks; the first and the last one in two runs.
TEST(CutNear, GoesToTheNextSequenceWhereThatIsNear) {
  RunList list;
  list.readers = {0, 0, 1, 2, 2};
  int reader = 0;
  for (const int blocks : {4, 2, 1, 2, 3}) {
    list.swing.Add({.region = kvcache::RegionKind::kSwing,
                    .num_blocks = blocks,
                    .first_reader = reader++,
                    .num_readers = 1});
  }
  const auto cut = [&](int64_t block, int64_t slack) {
    return CutNear(list, list.swing, block, slack);
  };
  for (int64_t block = -1; block <= 13; ++block) EXPECT_EQ(cut(block, 0), block);
  EXPECT_EQ(cut(1, 1), 0);
  EXPECT_EQ(cut(2, 1), 2);
  EXPECT_EQ(cut(4, 2), 6);  // Where a run ends but not its sequence there is nothing to cut at.
  EXPECT_EQ(cut(4, 1), 4);
  EXPECT_EQ(cut(5, 1), 6);
  EXPECT_EQ(cut(6, 3), 6);
  EXPECT_EQ(cut(8, 2), 7);
  EXPECT_EQ(cut(9, 1), 9);
  EXPECT_EQ(cut(10, 2), 12);  // The end
  EXPECT_EQ(cut(10, 3), 12);  // The nearer one
  EXPECT_EQ(cut(3, 3), 0);
  EXPECT_EQ(cut(12, 5), 12);
}

// Where the CPU is the weaker side all its workers claim before the query comes, and what they have
// claimed the link cannot take.
TEST(WorkerClaims, FirstClaimsBesideTheLinkAreNoMoreThanTheCpusPart) {
  constexpr int kBlocks = 800;
  constexpr int kWorkers = 14;
  StepAttention attention;
  attention.runs.readers = {0};
  attention.runs.swing.Add(
      {.region = kvcache::RegionKind::kSwing, .num_blocks = kBlocks, .num_readers = 1});
  const auto first_claims = [&](double cpu_share) {
    TurnProgress progress;
    progress.swing.Reset(kBlocks);
    StepContext step;
    step.micro_batches = {&attention, 1};
    step.num_turns = 1;
    step.handoff = true;
    step.num_workers = kWorkers;
    step.guided = true;
    step.cpu_share = cpu_share;
    step.turns = &progress;
    WorkerClaims claims({.num_kv_heads = 4, .k_dim = 128, .v_dim = 128}, kWorkers);
    claims.Clear();
    for (int worker = 0; worker < kWorkers; ++worker) EXPECT_TRUE(claims.Claim(worker, step, 0));
    return static_cast<double>(progress.swing.back()) / kBlocks;
  };
  for (const double share : {0.1, 0.2, 0.3}) {
    EXPECT_LE(first_claims(share), share);
    EXPECT_GT(first_claims(share), share / 2);
  }
  EXPECT_NEAR(first_claims(0.7), 0.39, 0.03);
}

}  // namespace
}  // namespace writescope::attention
