#include "engine/runtime/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "engine/base/status_macros.h"
#include "engine/runtime/error_reason.h"

namespace writescope::runtime {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr float kLargest = std::numeric_limits<float>::max();

// A uniform number in [0, 1) from a seed and a counter (the SplitMix64 finaliser over both), so
// that position i of a text draws the same number however the batch around it looks.
double Uniform(uint64_t seed, uint64_t counter) {
  uint64_t z = seed + 0x9e3779b97f4a7c15ull * (counter + 1);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  z ^= z >> 31;
  return static_cast<double>(z >> 11) * 0x1.0p-53;
}

absl::Status CheckNoNan(const kernels::RowMax& largest, int64_t index) {
  if (largest.first_nan < 0) return absl::OkStatus();
  return WithReason(
      absl::InternalError(absl::StrCat("the model's logit of token ", largest.first_nan,
                                       " is NaN at output position ", index)),
      "NUMERIC_FAILURE");
}

absl::Status NoFiniteLogit(int64_t index) {
  return WithReason(
      absl::InternalError(absl::StrCat("no token has a finite logit at output position ", index)),
      "NUMERIC_FAILURE");
}

// A token whose weight is less than 2^-60 of the best one's cannot be drawn by a number of 53 bits.
constexpr double kNegligibleLog = 60 * 0.6931471805599453;

}  // namespace

TokenId ArgMax(std::span<const float> logits) {
  return kernels::MaxOfRow(static_cast<int64_t>(logits.size()), logits.data()).index;
}

PositionLogprobs LogprobsOf(std::span<const float> logits, TokenId token, int top) {
  const float max = logits[static_cast<size_t>(ArgMax(logits))];
  double sum = 0;
  int rank = 1;
  const float own = logits[static_cast<size_t>(token)];
  for (size_t i = 0; i < logits.size(); ++i) {
    sum += std::exp(static_cast<double>(logits[i]) - max);
    if (logits[i] > own || (logits[i] == own && static_cast<TokenId>(i) < token)) ++rank;
  }
  const double log_sum = max + std::log(sum);
  const auto logprob = [&](TokenId id) {
    return static_cast<float>(logits[static_cast<size_t>(id)] - log_sum);
  };
  PositionLogprobs result;
  result.token = TokenLogprob{token, logprob(token), rank};
  std::vector<TokenId> ids(logits.size());
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<TokenId>(i);
  const size_t count = std::min(static_cast<size_t>(std::max(top, 0)), ids.size());
  std::partial_sort(ids.begin(), ids.begin() + static_cast<int64_t>(count), ids.end(),
                    [&](TokenId a, TokenId b) {
                      const float la = logits[static_cast<size_t>(a)];
                      const float lb = logits[static_cast<size_t>(b)];
                      return la != lb ? la > lb : a < b;
                    });
  for (size_t i = 0; i < count; ++i) {
    result.top.push_back({ids[i], logprob(ids[i]), static_cast<int>(i) + 1});
  }
  return result;
}

Sampler::Sampler(const SamplingParams& params, uint64_t seed, std::span<const TokenId> prompt)
    : params_(params), seed_(seed) {
  if (params_.repetition_penalty == 1) return;
  for (const TokenId token : prompt) seen_[token] = true;
}

void Sampler::Accept(TokenId token) {
  if (params_.repetition_penalty != 1) seen_[token] = true;
  if (params_.presence_penalty != 0 || params_.frequency_penalty != 0) ++output_counts_[token];
}

void Sampler::Penalise(std::vector<float>& logits) const {
  const float penalty = static_cast<float>(params_.repetition_penalty);
  for (const auto& [token, unused] : seen_) {
    float& logit = logits[static_cast<size_t>(token)];
    // A penalty near 0 makes the quotient overflow; the token is the most likely one all the same.
    logit = logit > 0 ? std::min(logit / penalty, kLargest) : logit * penalty;
  }
  for (const auto& [token, count] : output_counts_) {
    logits[static_cast<size_t>(token)] -= static_cast<float>(
        params_.presence_penalty + params_.frequency_penalty * static_cast<double>(count));
  }
}

bool Sampler::takes_largest() const {
  return params_.temperature == 0 && params_.repetition_penalty == 1 &&
         params_.presence_penalty == 0 && params_.frequency_penalty == 0;
}

absl::StatusOr<SampledToken> Sampler::SampleLargest(const kernels::RowMax& largest, int64_t index) {
  RETURN_IF_ERROR(CheckNoNan(largest, index));
  if (!std::isfinite(largest.value)) return NoFiniteLogit(index);
  return SampledToken{.token = largest.index};
}

absl::StatusOr<SampledToken> Sampler::Sample(std::span<const float> logits, int64_t index,
                                             std::span<const TokenId> banned,
                                             std::optional<int> top_logprobs) {
  RETURN_IF_ERROR(
      CheckNoNan(kernels::MaxOfRow(static_cast<int64_t>(logits.size()), logits.data()), index));
  work_.assign(logits.begin(), logits.end());
  Penalise(work_);
  for (const TokenId token : banned) {
    if (static_cast<size_t>(token) < work_.size())
      work_[static_cast<size_t>(token)] = kMinusInfinity;
  }
  SampledToken result;
  result.token = ArgMax(work_);
  if (!std::isfinite(work_[static_cast<size_t>(result.token)])) return NoFiniteLogit(index);
  if (params_.temperature > 0) result.token = Draw(index);
  if (top_logprobs.has_value()) result.logprobs = LogprobsOf(logits, result.token, *top_logprobs);
  return result;
}

TokenId Sampler::Draw(int64_t index) {
  const double max = work_[static_cast<size_t>(ArgMax(work_))];
  const double negligible = max - kNegligibleLog * params_.temperature;
  candidates_.clear();
  for (size_t i = 0; i < work_.size(); ++i) {
    if (work_[i] >= negligible) candidates_.push_back({work_[i], 0, static_cast<TokenId>(i)});
  }
  const auto more_likely = [](const Candidate& a, const Candidate& b) {
    return a.logit != b.logit ? a.logit > b.logit : a.token < b.token;
  };
  if (params_.top_k > 0 && static_cast<size_t>(params_.top_k) < candidates_.size()) {
    std::nth_element(candidates_.begin(), candidates_.begin() + params_.top_k - 1,
                     candidates_.end(), more_likely);
    candidates_.resize(static_cast<size_t>(params_.top_k));
  }
  double total = 0;
  for (Candidate& c : candidates_) {
    // A temperature near 0 makes the quotient overflow for all but the best, which is what it
    // means.
    c.weight = std::exp((c.logit - max) / params_.temperature);
    total += c.weight;
  }
  KeepTopP(total, more_likely);
  std::erase_if(candidates_, [&](const Candidate& c) { return c.weight < params_.min_p; });
  // In the order of ids, so that the draw does not depend on how the set was found.
  std::sort(candidates_.begin(), candidates_.end(),
            [](const Candidate& a, const Candidate& b) { return a.token < b.token; });
  double kept = 0;
  for (const Candidate& c : candidates_) kept += c.weight;
  double target = Uniform(seed_, static_cast<uint64_t>(index)) * kept;
  for (const Candidate& c : candidates_) {
    target -= c.weight;
    if (target < 0) return c.token;
  }
  return candidates_.back().token;
}

template <typename Order>
void Sampler::KeepTopP(double total, const Order& more_likely) {
  if (params_.top_p >= 1) return;
  // The shortest head that holds top_p of the probability is short as a rule: heads that grow are
  // sorted, not the vocabulary.
  constexpr size_t kFirstHead = 256;
  double kept = 0;
  size_t count = 0;
  for (size_t head = std::min(kFirstHead, candidates_.size());;
       head = std::min(8 * head, candidates_.size())) {
    const auto begin = candidates_.begin() + static_cast<int64_t>(count);
    const auto end = candidates_.begin() + static_cast<int64_t>(head);
    if (head < candidates_.size()) {
      std::nth_element(begin, end - 1, candidates_.end(), more_likely);
    }
    std::sort(begin, end, more_likely);
    while (count < head && (count == 0 || kept < params_.top_p * total)) {
      kept += candidates_[count++].weight;
    }
    if (count < head || head == candidates_.size()) break;
  }
  candidates_.resize(count);
}

}  // namespace writescope::runtime
