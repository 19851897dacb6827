// The reference outputs beside the tiny checkpoints of tests/testdata/goldens, and how logits are
// compared with them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "engine/base/units.h"
#include "engine/model/config.h"
#include "engine/ops/ops.h"
#include "tests/support/tiny_model.h"

namespace writescope::testing {

// The lengths of the prompts that each folder has.
inline constexpr int kGoldenPromptLengths[] = {5, 16, 33, 130, 517};

struct Golden {
  std::vector<TokenId> prompt;
  std::vector<std::vector<float>> logits;  // Of the last positions of the prompt
  std::vector<TokenId> greedy;
  std::vector<std::vector<float>> greedy_logits;
};

// `folder` is that of the checkpoint.
Golden ReadGolden(const std::string& folder, int length, int vocab);

// Infinite when the sizes differ; a NaN is the worst error.
float MaxError(const std::vector<float>& a, const std::vector<float>& b);
// By how much the best token is ahead of the next.
float Margin(std::vector<float> logits);
TokenId ArgMax(const std::vector<float>& logits);

// Writes down, or dictates, the experts of every step and layer of one sequence. The routers of the
// tiny checkpoints are random and flip between experts of nearly equal score when anything is
// rounded, which says nothing about the rounding.
class ExpertTape {
 public:
  explicit ExpertTape(const model::ModelConfig& config) : k_(config.moe.experts_per_token) {}
  void BeginStep(size_t num_tokens);
  void Rewind() { step_ = -1; }
  ops::ExpertChoice Record(int layer);
  ops::ExpertChoice Replay(int layer) { return {.replay = choices_.at({step_, layer}).data()}; }

 private:
  const int k_;
  int step_ = -1;
  size_t num_tokens_ = 0;
  std::map<std::pair<int, int>, std::vector<int32_t>> choices_;
};

// The logits of every position of the prompt and of the greedy continuation, teacher-forced.
std::vector<std::vector<float>> AllLogits(TinyModel& tiny, const Golden& golden, ExpertTape& tape);

}  // namespace writescope::testing
