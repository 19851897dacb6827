// The layers of checks of attention_problems.h.
#include <algorithm>
#include <cmath>
#include <sstream>

#include "tests/support/attention_problems.h"

namespace writescope::testing_support {
namespace {

// The relative error that a weight may have where scores have this standard deviation. Products and
// sums are float. A score is a sum of k_dim products whose running total grows like a random walk
// to about sigma, so its rounding errors of 2^-24 add up to some 2^-24 sqrt(k_dim) sigma; weights
// and values add a few 2^-24 of their own. The factor 4 is for the worst of many.
double WeightError(const AttentionShape& shape, double sigma) {
  return 0x1p-24 * (4 * std::sqrt(shape.k_dim) * sigma + 8);
}

// Whether weights are rounded to bf16 before they meet values.
bool RoundsWeights(const RunAttention& run, const AttentionShape& shape) {
  return run.products == kernels::AttentionProducts::kBf16 && shape.dtype == KvDtype::kBf16;
}
// By how much of itself at most: half a unit in the last of 8 bits.
constexpr double kRoundingError = 0x1p-8;

// Queries that the rounding leaves as they are: what it does to them is no fault, and is looked at
// in a test of its own.
AttentionProblem ProblemFor(const RunAttention& run, const AttentionShape& shape, double sigma,
                            bool masked, std::mt19937_64& rng) {
  AttentionProblem problem = RandomProblem(shape, sigma, masked, rng);
  if (RoundsWeights(run, shape)) RoundQueries(&problem);
  return problem;
}

// Gives the blocks to `run` in calls that are cut at random.
Partials<float> RunCut(const RunAttention& run, const AttentionProblem& problem,
                       std::span<const kernels::KvHeadBlock> blocks, std::mt19937_64& rng) {
  RunningStates<float> states(problem.shape.num_rows, problem.shape.v_dim);
  while (!blocks.empty()) {
    const size_t count = 1 + rng() % blocks.size();
    run(states.Args(problem, blocks.first(count)));
    blocks = blocks.subspan(count);
  }
  return states.Finish();
}

// Also cuts the tokens into blocks at random.
Partials<float> RunCut(const RunAttention& run, const AttentionProblem& problem,
                       std::mt19937_64& rng) {
  const std::vector<int> fills = rng() % 2 == 0 ? FullFills(problem.shape.num_tokens)
                                                : RandomFills(problem.shape.num_tokens, rng);
  return RunCut(run, problem, TiledKv(problem.shape, problem.k, problem.v, fills).blocks(), rng);
}

std::string Describe(const char* layer, const AttentionShape& shape, int row, int dim, double got,
                     double want, double bound) {
  std::ostringstream text;
  text.precision(9);
  text << layer << ", " << shape.Name() << ": row " << row << " dim " << dim << " is " << got
       << ", should be " << want << " within " << bound;
  return text.str();
}

// Compares with the dense answer; `bound` is a function of the index of the output. `error` is that
// of the weights.
template <typename Bound>
std::string Compare(const char* layer, const AttentionProblem& problem, const DenseAnswer& want,
                    const Partials<float>& got, double error, const Bound& bound) {
  const int v_dim = problem.shape.v_dim;
  for (int r = 0; r < problem.shape.num_rows; ++r) {
    const double want_lse = want.partials.lse[r];
    if (std::isinf(want_lse)) {
      if (got.lse[r] != kernels::kEmptyLse) {
        return Describe(layer, problem.shape, r, -1, got.lse[r], want_lse, 0);
      }
    } else if (const double lse_bound = 2 * error + 0x1p-22 * std::fabs(want_lse);
               !(std::fabs(got.lse[r] - want_lse) <= lse_bound)) {
      return Describe(layer, problem.shape, r, -1, got.lse[r], want_lse, lse_bound);
    }
    for (int d = 0; d < v_dim; ++d) {
      const int64_t i = int64_t{r} * v_dim + d;
      const double want_out = std::isinf(want_lse) ? 0 : want.partials.out[i];
      const double allowed = std::isinf(want_lse) ? 0 : bound(i);
      if (!(std::fabs(got.out[i] - want_out) <= allowed)) {
        return Describe(layer, problem.shape, r, d, got.out[i], want_out, allowed);
      }
    }
  }
  return {};
}

}  // namespace

std::string FaultWithNeedles(const RunAttention& run, const AttentionShape& shape,
                             std::mt19937_64& rng) {
  AttentionProblem problem = NeedleProblem(shape, rng);
  const TiledKv full(shape, problem.k, problem.v, FullFills(shape.num_tokens));
  const TiledKv ragged(shape, problem.k, problem.v, RandomFills(shape.num_tokens, rng));
  for (int first = 0; first < shape.num_tokens; first += shape.num_rows) {
    std::vector<int> wanted(shape.num_rows);
    for (int r = 0; r < shape.num_rows; ++r) wanted[r] = (first + r) % shape.num_tokens;
    std::shuffle(wanted.begin(), wanted.end(), rng);
    AskForNeedles(wanted, &problem);
    const TiledKv& kv = rng() % 2 == 0 ? full : ragged;
    const Partials<float> got = RunCut(run, problem, kv.blocks(), rng);
    for (int r = 0; r < shape.num_rows; ++r) {
      for (int d = 0; d < shape.v_dim; ++d) {
        const float value = got.out[int64_t{r} * shape.v_dim + d];
        const float want = problem.v[int64_t{wanted[r]} * shape.v_dim + d];
        if (value != want) return Describe("needle", shape, r, d, value, want, 0);
      }
    }
  }
  return {};
}

std::string FaultWithFlatScores(const RunAttention& run, const AttentionShape& shape,
                                std::mt19937_64& rng) {
  constexpr double kSigma = 0.3;
  const double error = WeightError(shape, kSigma);
  const double independent_error = error + (RoundsWeights(run, shape) ? kRoundingError : 0);
  for (const bool masked : {false, true}) {
    const AttentionProblem problem = ProblemFor(run, shape, kSigma, masked, rng);
    const DenseAnswer want = AnswerDensely(problem);
    // Weights stray independently of each other, with a variance of at most a third of error^2: 6
    // sigma of their sum. What all weights share (the maximum, the sum) is the last term. A lost
    // token moves the output by p |v|, thousands of times as much; where weights are rounded,
    // several times as much at 1,000 tokens.
    const std::string fault =
        Compare(masked ? "flat scores, masked" : "flat scores", problem, want,
                RunCut(run, problem, rng), error, [&](int64_t i) {
                  return 6 * independent_error / std::sqrt(3.0) * std::sqrt(want.square_sum[i]) +
                         error * std::fabs(want.partials.out[i]);
                });
    if (!fault.empty()) return fault;
  }
  return {};
}

std::string FaultWithRandomScores(const RunAttention& run, const AttentionShape& shape,
                                  std::mt19937_64& rng) {
  for (const double sigma : {0.3, 2.0, 8.0}) {
    const AttentionProblem problem = ProblemFor(run, shape, sigma, rng() % 2 == 0, rng);
    const DenseAnswer want = AnswerDensely(problem);
    const double error = WeightError(shape, sigma);
    const double weight_error = error + (RoundsWeights(run, shape) ? kRoundingError : 0);
    const std::string fault =
        Compare("random scores", problem, want, RunCut(run, problem, rng), error, [&](int64_t i) {
          return weight_error * want.abs_sum[i] + error * std::fabs(want.partials.out[i]);
        });
    if (!fault.empty()) return fault;
  }
  return {};
}

}  // namespace writescope::testing_support
