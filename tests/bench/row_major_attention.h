// Attention over pages of 16 tokens whose rows are tokens, K [16, 128] then V [16, 128], as paged
// caches have them: what the tile format is compared with. As the engine's kernel for AVX512-BF16
// it is one pass with an online softmax, products by vdpbf16ps, and lines fetched ahead into the
// first cache in their order; what differs is what the layout costs: a sum across lanes for every
// score, and pairs of V rows that have to be interleaved before they can be multiplied.
#pragma once

#include <cstddef>
#include <cstdint>

namespace writescope::bench {

constexpr int kPageTokens = 16;
constexpr int kRowMajorDim = 128;  // Of keys and of values
constexpr int64_t kPageHeadBytes = int64_t{kPageTokens} * kRowMajorDim * 2 * 2;
constexpr int kMaxRowMajorRows = 8;

// Query heads that share one KV head, and their running states as in attention_partial.h.
struct RowMajorState {
  int num_rows = 0;                            // 4 or 8
  uint16_t q[kMaxRowMajorRows][kRowMajorDim];  // bf16, scaled
  float o[kMaxRowMajorRows][kRowMajorDim];     // In the order of the interleaved rows
  float m[kMaxRowMajorRows], l[kMaxRowMajorRows];
};

// Attends to the part of a page that is of one KV head. What follows it in memory is fetched, as it
// is what follows in time. Needs AVX512-BF16.
void AttendRowMajor(const std::byte* page, RowMajorState& state);
// o / l of a row in the order of dims.
void FinishRowMajor(const RowMajorState& state, int row, float* out);

}  // namespace writescope::bench
