// Attention by its formula, in double, over plain arrays: no tiles, no blocks, no running state.
// What every path through the engine is measured against.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace writescope::testing {

// Keys and values of one KV head of one layer, by position, as they are stored (rounded).
struct PlainHead {
  int k_dim = 0;
  int v_dim = 0;
  std::vector<float> k;  // [num_tokens, k_dim]
  std::vector<float> v;  // [num_tokens, v_dim]
};

struct PlainOutput {
  std::vector<double> out;      // [v_dim]; sum p v
  std::vector<double> abs_sum;  // sum p |v|
  std::vector<double> sq_sum;   // sum p^2 v^2
  double max_abs_score = 0;     // Base-2 scores
  double tolerance = 0;         // FloatTolerance
};

// Of the first `num_tokens` tokens. `q` is scaled by log2(e) * softmax scale.
PlainOutput AttendPlain(const PlainHead& head, int64_t num_tokens, std::span<const float> q);

// How far a float32 engine may be from `plain` in dim d: out is a mean of rows of v, so an error e
// of the base-2 scores moves it by at most 2 ln(2) e max|v|; the sums add their own rounding.
double FloatTolerance(const PlainHead& head, int64_t num_tokens, const PlainOutput& plain);

// What an engine that rounds probabilities to bf16 may stray by (each bound holds in dim d):
// always, and at six sigma where the rounding errors are independent.
double Bf16Bound(const PlainOutput& plain, int d);
double Bf16SixSigma(const PlainOutput& plain, int d);

}  // namespace writescope::testing
