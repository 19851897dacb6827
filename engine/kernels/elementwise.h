// The small row operations of the model: norm, rotary embedding, gated activation, embedding
// lookup, the largest logit. Float32 throughout; each has a twin, in double where it rounds.
// Single-threaded.
#pragma once

#include <cstddef>
#include <cstdint>

namespace writescope::kernels {

// out = (x / rms(x)) * weight over `dim` values, rms with eps under the root; the weight multiplies
// the normalised value. x and out may be the same.
void RmsNormRow(int64_t dim, const float* x, const float* weight, float eps, float* out);
void RmsNormRowRef(int64_t dim, const float* x, const float* weight, float eps, double* out);

// Cosine and sine of float(position) * inv_freq[i], times `scale`, for i in [0, half).
void RopeAngles(int64_t position, int half, const float* inv_freq, float scale, float* cos_out,
                float* sin_out);
// Rotates the pairs (x[i], x[i + half]) by the angles, in place.
void RopeRow(int half, const float* cos_values, const float* sin_values, float* x);
// Both steps; the angle is rounded to float as the model defines it, the rest is double.
void RopeRowRef(int64_t position, int half, const float* inv_freq, float scale, const float* x,
                double* out);

// out[i] = silu(gate[i]) * up[i], silu(g) = g / (1 + e^-g). out may be either input.
void SwiGlu(int64_t count, const float* gate, const float* up, float* out);
void SwiGluRef(int64_t count, const float* gate, const float* up, double* out);

// The largest value of a row; NaN is passed over.
struct alignas(16) RowMax {
  float value = 0;         // -infinity when none is larger
  int32_t index = 0;       // The lowest of equal ones; 0 when none is above -infinity
  int32_t first_nan = -1;  // Index; -1 without one
};
RowMax MaxOfRow(int64_t dim, const float* x);
RowMax MaxOfRowRef(int64_t dim, const float* x);

// Widens `count` bf16 values.
void Bf16ToFloats(int64_t count, const std::byte* from, float* to);

}  // namespace writescope::kernels
