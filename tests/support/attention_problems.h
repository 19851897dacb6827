// Attention problems with known answers, for every implementation of the attention contract: seeded
// data in dense arrays, the same data as tiles, and plain softmax attention over the dense arrays.
#pragma once

#include <cstdint>
#include <functional>
#include <ostream>
#include <random>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "engine/kernels/attention_partial.h"

namespace writescope::testing_support {

struct AttentionShape {
  int k_dim = 32;
  int v_dim = 32;
  bool value_in_key = false;
  KvDtype dtype = KvDtype::kBf16;
  int num_rows = 1;
  int num_tokens = 0;

  std::string Name() const;
};

// The k_dim, v_dim and value_in_key, both dtypes, head groups and lengths that the kernels must
// serve.
std::vector<AttentionShape> AttentionShapes();

// K and V of one KV head in tiles. Blocks may be filled in part: `fills` are their tokens in order.
class TiledKv {
 public:
  TiledKv(const AttentionShape& shape, const std::vector<float>& k, const std::vector<float>& v,
          const std::vector<int>& fills);
  const std::vector<kernels::KvHeadBlock>& blocks() const { return blocks_; }
  std::byte* k_plane(int block) { return storage_[2 * block].data(); }
  std::byte* v_plane(int block) { return storage_[2 * block + 1].data(); }

 private:
  std::vector<std::vector<std::byte>> storage_;  // K plane, V plane of each block
  std::vector<kernels::KvHeadBlock> blocks_;
};

// As many full blocks as there are, then the rest.
std::vector<int> FullFills(int num_tokens);
// Fills of 1 to 64 tokens.
std::vector<int> RandomFills(int num_tokens, std::mt19937_64& rng);

struct AttentionProblem {
  AttentionShape shape;
  std::vector<float> k;          // [num_tokens, k_dim], representable in the dtype
  std::vector<float> v;          // [num_tokens, v_dim]; with value_in_key a copy of k's first dims
  std::vector<float> q;          // [num_rows, k_dim]
  std::vector<int64_t> visible;  // [num_rows], or empty: all
};

// Gaussian data; scores have about this standard deviation (in the base-2 logarithm).
AttentionProblem RandomProblem(const AttentionShape& shape, double score_sigma, bool masked,
                               std::mt19937_64& rng);
// Keys and values for needles: all tokens differ. Queries come from AskForNeedles.
AttentionProblem NeedleProblem(const AttentionShape& shape, std::mt19937_64& rng);
// Row r looks for token `wanted[r]`, and finds it: every other score is over 126 lower, so its
// weight is exactly 0 and the output is V of that token in every bit.
void AskForNeedles(const std::vector<int>& wanted, AttentionProblem* problem);
// Queries that bf16 represents: an implementation that rounds them then has the same scores.
void RoundQueries(AttentionProblem* problem);

// Finished partials.
template <typename T>
struct Partials {
  std::vector<T> out;  // [num_rows, v_dim]
  std::vector<T> lse;  // [num_rows]
};

// Softmax attention over the dense arrays, in double; also sums of p |v| and p^2 v^2.
struct DenseAnswer {
  Partials<double> partials;
  std::vector<double> abs_sum;     // [num_rows, v_dim] sum p |v|
  std::vector<double> square_sum;  // [num_rows, v_dim] sum p^2 v^2
};
DenseAnswer AnswerDensely(const AttentionProblem& problem);

// Running states of all rows of a problem.
template <typename T>
class RunningStates {
 public:
  RunningStates(int num_rows, int v_dim);
  RunningStates(RunningStates&&) = default;  // The arguments point into the arrays.
  RunningStates& operator=(RunningStates&&) = default;
  // The arguments for all rows over `blocks`.
  kernels::AttentionPartialArgsT<T> Args(const AttentionProblem& problem,
                                         std::span<const kernels::KvHeadBlock> blocks);
  Partials<T> Finish() const;
  const std::vector<T>& o() const { return o_; }
  const std::vector<T>& m() const { return m_; }
  const std::vector<T>& l() const { return l_; }

 private:
  int num_rows_;
  int v_dim_;
  std::vector<T> o_, m_, l_;
  std::vector<T*> o_rows_, m_rows_, l_rows_;
  std::vector<const float*> q_rows_;
};

// An implementation, and what it multiplies.
struct RunAttention {
  using Run = std::function<void(const kernels::AttentionPartialArgs&)>;
  template <typename F>
  requires std::is_invocable_v<F, const kernels::AttentionPartialArgs&> RunAttention(
      F f,  // NOLINT: implicit, as of std::function
      kernels::AttentionProducts p = kernels::AttentionProducts::kF32)
      : run(std::move(f)), products(p) {}
  void operator()(const kernels::AttentionPartialArgs& args) const { run(args); }

  Run run;
  kernels::AttentionProducts products;
};

// The layers of checks that an implementation must pass for a shape. Each returns what is wrong, or
// nothing. They cut the tokens into blocks, and the blocks into calls, at random.
//
// For every token: a query that finds only it must return its value in every bit.
std::string FaultWithNeedles(const RunAttention& run, const AttentionShape& shape,
                             std::mt19937_64& rng);
// Nearly equal scores, where each token has about the same weight: a lost one cannot hide.
std::string FaultWithFlatScores(const RunAttention& run, const AttentionShape& shape,
                                std::mt19937_64& rng);
// Scores of sigma 0.3 to 8, masked and not.
std::string FaultWithRandomScores(const RunAttention& run, const AttentionShape& shape,
                                  std::mt19937_64& rng);

}  // namespace writescope::testing_support

namespace writescope::kernels {

// For the names of tests.
inline void PrintTo(const AttentionVariant& variant, std::ostream* out) { *out << variant.name; }

}  // namespace writescope::kernels
