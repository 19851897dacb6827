#include "engine/runtime/scheduler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace writescope::runtime {
namespace {

using Kind = StepChoice::Kind;

std::vector<SchedulableSequence> Pending(const std::vector<int64_t>& pending) {
  std::vector<SchedulableSequence> sequences;
  for (const int64_t p : pending) sequences.push_back({.pending = p});
  return sequences;
}

TEST(SchedulerTest, PromptsAndDecodeStepsTakeTurns) {
  const auto sequences = Pending({1, 900, 1});
  const StepChoice prefill = ChooseStep(sequences, 512, false);
  EXPECT_EQ(prefill.kind, Kind::kPrefill);
  ASSERT_EQ(prefill.parts.size(), 1u);
  EXPECT_EQ(prefill.parts[0].index, 1u);
  EXPECT_EQ(prefill.parts[0].num_tokens, 512);
  const StepChoice decode = ChooseStep(sequences, 512, true);
  EXPECT_EQ(decode.kind, Kind::kDecode);
  ASSERT_EQ(decode.parts.size(), 2u);
}

TEST(StepTurnsTest, PromptsGetAChunkAndThenAsMuchTimeAsTheDecodeStepTook) {
  StepTurns turns;
  EXPECT_FALSE(turns.prefill_is_over());
  turns.PrefillTook(0.1);
  EXPECT_TRUE(turns.prefill_is_over());
  turns.DecodeTook(0.01);
  EXPECT_FALSE(turns.prefill_is_over());
  turns.PrefillTook(0.1);
  EXPECT_TRUE(turns.prefill_is_over());  // A chunk longer than the step: one is enough.
  turns.DecodeTook(0.7);
  for (int chunk = 0; chunk < 7; ++chunk) {
    EXPECT_FALSE(turns.prefill_is_over()) << chunk;
    turns.PrefillTook(0.101);
  }
  EXPECT_TRUE(turns.prefill_is_over());
}

TEST(SchedulerTest, WithoutTheOtherKindThereIsNoTurnToWaitFor) {
  EXPECT_EQ(ChooseStep(Pending({900}), 512, true).kind, Kind::kPrefill);
  EXPECT_EQ(ChooseStep(Pending({1, 1}), 512, false).kind, Kind::kDecode);
  EXPECT_EQ(ChooseStep(Pending({}), 512, false).kind, Kind::kIdle);
  EXPECT_EQ(ChooseStep(Pending({0, 0}), 512, false).kind, Kind::kIdle);
}

TEST(SchedulerTest, AChunkGoesToTheOldestAndItsRestToTheNext) {
  const StepChoice choice = ChooseStep(Pending({100, 300, 400, 50}), 512, false);
  ASSERT_EQ(choice.parts.size(), 3u);
  EXPECT_EQ(choice.parts[0].num_tokens, 100);
  EXPECT_EQ(choice.parts[1].num_tokens, 300);
  EXPECT_EQ(choice.parts[2].num_tokens, 112);
}

TEST(SchedulerTest, EveryTokenIsScheduledOnceAndNobodyStarves) {
  std::mt19937 rng(3);
  for (int round = 0; round < 200; ++round) {
    std::vector<int64_t> pending(1 + rng() % 8);
    for (int64_t& p : pending) p = static_cast<int64_t>(rng() % 2000);
    bool last_was_prefill = false;
    int decode_gap = 0;
    for (int step = 0; step < 200; ++step) {
      const auto sequences = Pending(pending);
      const StepChoice choice = ChooseStep(sequences, 256, last_was_prefill);
      if (choice.kind == Kind::kIdle) break;
      last_was_prefill = choice.kind == Kind::kPrefill;
      decode_gap = last_was_prefill ? decode_gap + 1 : 0;
      const bool can_decode =
          std::any_of(pending.begin(), pending.end(), [](int64_t p) { return p == 1; });
      EXPECT_TRUE(!can_decode || decode_gap <= 1);
      int64_t tokens = 0;
      for (const StepChoice::Part& part : choice.parts) {
        ASSERT_LE(part.num_tokens, pending[part.index]);
        ASSERT_GT(part.num_tokens, 0);
        tokens += part.num_tokens;
        pending[part.index] -= part.num_tokens;
      }
      EXPECT_TRUE(choice.kind == Kind::kDecode || tokens <= 256);
    }
  }
}

}  // namespace
}  // namespace writescope::runtime
