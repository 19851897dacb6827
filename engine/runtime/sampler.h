// From logits to the next token. Pure: the same logits, parameters, history and seed give the same
// token.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "engine/base/units.h"
#include "engine/kernels/elementwise.h"
#include "engine/runtime/request.h"

namespace writescope::runtime {

struct SampledToken {
  TokenId token = 0;
  std::optional<PositionLogprobs> logprobs;
};

// The index of the largest logit; the lowest of equal ones. 0 when none is above -infinity.
TokenId ArgMax(std::span<const float> logits);

// Log-probabilities of one row: of `token`, and of the `top` most likely tokens (ties: lowest id
// first).
PositionLogprobs LogprobsOf(std::span<const float> logits, TokenId token, int top);

// One per request. Engine thread.
class Sampler {
 public:
  // `seed` is params.seed, or what the engine drew for it.
  Sampler(const SamplingParams& params, uint64_t seed, std::span<const TokenId> prompt);

  // The token for output position `index` (from 0). Tokens in `banned` cannot come out. With
  // `top_logprobs` their log-probabilities come along. INTERNAL for NaN, or when no token is left
  // with a finite logit.
  absl::StatusOr<SampledToken> Sample(std::span<const float> logits, int64_t index,
                                      std::span<const TokenId> banned,
                                      std::optional<int> top_logprobs);
  // Whether the token is the most likely one by the logits as they are. Where nothing is banned and
  // no log-probabilities are asked for, SampleLargest then says the same as Sample.
  bool takes_largest() const;
  static absl::StatusOr<SampledToken> SampleLargest(const kernels::RowMax& largest, int64_t index);
  // The token is part of the output from now on: it counts for the penalties.
  void Accept(TokenId token);

 private:
  void Penalise(std::vector<float>& logits) const;
  TokenId Draw(int64_t index);
  // Of candidates_ keeps the most likely ones that hold top_p of `total`, at least one.
  template <typename Order>
  void KeepTopP(double total, const Order& more_likely);

  const SamplingParams params_;
  const uint64_t seed_;
  absl::flat_hash_map<TokenId, int> output_counts_;
  absl::flat_hash_map<TokenId, bool>
      seen_;  // In prompt or output; filled with a repetition penalty
  std::vector<float> work_;
  struct Candidate {
    float logit;
    double weight;
    TokenId token;
  };
  std::vector<Candidate> candidates_;
};

}  // namespace writescope::runtime
