#include "tests/support/goldens.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

#include "engine/model/safetensors.h"

namespace writescope::testing {
namespace {

template <typename T>
std::vector<T> Read(const model::SafetensorsFile& file, const std::string& name) {
  const model::TensorView* tensor = file.Find(name);
  std::vector<T> values(static_cast<size_t>(tensor->num_elements()));
  std::memcpy(values.data(), tensor->bytes.data(), values.size() * sizeof(T));
  return values;
}

std::vector<std::vector<float>> Rows(const std::vector<float>& flat, size_t width) {
  std::vector<std::vector<float>> rows;
  for (size_t i = 0; i < flat.size(); i += width) {
    rows.emplace_back(flat.begin() + static_cast<int64_t>(i),
                      flat.begin() + static_cast<int64_t>(i + width));
  }
  return rows;
}

}  // namespace

Golden ReadGolden(const std::string& folder, int length, int vocab) {
  const auto file = model::SafetensorsFile::Open(folder + "/golden.safetensors");
  EXPECT_TRUE(file.ok()) << file.status();
  const std::string suffix = "." + std::to_string(length);
  Golden golden;
  golden.prompt = Read<TokenId>(*file, "prompt" + suffix);
  golden.logits = Rows(Read<float>(*file, "logits" + suffix), static_cast<size_t>(vocab));
  golden.greedy = Read<TokenId>(*file, "greedy" + suffix);
  golden.greedy_logits =
      Rows(Read<float>(*file, "greedy_logits" + suffix), static_cast<size_t>(vocab));
  return golden;
}

float MaxError(const std::vector<float>& a, const std::vector<float>& b) {
  float worst = a.size() == b.size() ? 0 : INFINITY;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    const float error = std::fabs(a[i] - b[i]);
    worst = error <= worst ? worst : error;
  }
  return worst;
}

float Margin(std::vector<float> logits) {
  std::nth_element(logits.begin(), logits.begin() + 1, logits.end(), std::greater<>());
  return logits[0] - logits[1];
}

TokenId ArgMax(const std::vector<float>& logits) {
  return static_cast<TokenId>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

void ExpertTape::BeginStep(size_t num_tokens) {
  num_tokens_ = num_tokens;
  ++step_;
}

ops::ExpertChoice ExpertTape::Record(int layer) {
  auto& choice = choices_[{step_, layer}];
  choice.resize(num_tokens_ * static_cast<size_t>(k_));
  return {.record = choice.data()};
}

std::vector<std::vector<float>> AllLogits(TinyModel& tiny, const Golden& golden, ExpertTape& tape) {
  Driver driver(tiny);
  const attention::SharePlan share{.meet = false, .cpu_share = 0.5, .handoff = true};
  tape.Rewind();
  tape.BeginStep(golden.prompt.size());
  auto logits = driver.Feed(golden.prompt, 2048, true, share);
  EXPECT_TRUE(logits.ok()) << logits.status();
  for (const TokenId token : golden.greedy) {
    tape.BeginStep(1);
    auto next = driver.Feed({token}, 1, true, share);
    EXPECT_TRUE(next.ok()) << next.status();
    logits->push_back(next->back());
  }
  return *logits;
}

}  // namespace writescope::testing
