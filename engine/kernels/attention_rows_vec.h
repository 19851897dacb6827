// What the vector kernels of attention do with rows, whatever they multiply with. Included by the
// files of one instruction set only; see simd_vec.h.
#pragma once

#include "engine/kernels/attention_partial_flat.h"
#include "engine/kernels/simd_vec.h"

namespace writescope::kernels {
namespace {

constexpr float kMinusInf = -__builtin_inff();
constexpr IntVec kLane = LaneNumbers(LaneIndices());

// Slots of `block` that a row sees.
inline int SeenTokens(const FlatAttentionArgs& args, const KvHeadBlock& block, int row) {
  if (args.visible == nullptr) return block.num_tokens;
  const int64_t seen = args.visible[row] - block.first_position;
  if (seen <= 0) return 0;
  return seen < block.num_tokens ? static_cast<int>(seen) : block.num_tokens;
}

// Calls body.template operator()<kRows>(row) for groups of kMost, a power of two, and the rest in
// halves of it, that cover [first, last).
template <int kMost, typename Body>
inline void ForRowGroups(int first, int last, const Body& body) {
  int row = first;
  for (; row + kMost <= last; row += kMost) body.template operator()<kMost>(row);
  if constexpr (kMost > 1) {
    if (row < last) ForRowGroups<kMost / 2>(row, last, body);
  }
}

// How many calls that makes.
template <int kMost>
constexpr int NumRowGroups(int num_rows) {
  return num_rows / kMost + __builtin_popcount(static_cast<unsigned>(num_rows % kMost));
}

// Gives 2^(score - m) of the first `count` scores of a row to store(index, powers), kLanes at a
// time, and moves the row's running maximum and sum on. Returns the factor for what was summed
// before. The scores from index on are at at(index), for multiples of kLanes; those from `count` on
// are not read by anyone later.
//
// The running maximum stays where it is as long as no score is more than `slack` above it.
// A new maximum is rare, the logarithm of the number of blocks, so it is a branch: what follows
// does not wait for a maximum across lanes, and the next row's work begins at once.
template <typename ScoresAt, typename StorePowers>
WRITESCOPE_INLINE float SoftmaxRowAt(const ScoresAt& at, int count, float slack, float* m, float* l,
                                     const StorePowers& store) {
  const int num_vecs = (count + kLanes - 1) / kLanes;
  if (count % kLanes != 0) {
    float* last = at((num_vecs - 1) * kLanes);
    Store(last, kLane < count % kLanes ? Load(last) : Vec{} + kMinusInf);
  }
  Vec best = Vec{} + kMinusInf;
#pragma GCC unroll 4
  for (int v = 0; v < num_vecs; ++v) {
    const Vec score = Load(at(v * kLanes));
    best = score > best ? score : best;  // A NaN is passed over here; it comes back by its 2^NaN.
  }
  float base = *m;
  float factor = 1.0f;
  if (AnyLane(best > base + slack)) [[unlikely]] {
    const float m_new = MaxOfLanes(best);
    factor = Exp2(Vec{} + (base - m_new))[0];
    *m = base = m_new;
  }
  if (base == kMinusInf) base = 0.0f;  // (-inf) - (-inf) would be NaN.
  Vec sum = Vec{};
#pragma GCC unroll 4
  for (int v = 0; v < num_vecs; ++v) {
    const Vec power = Exp2(Load(at(v * kLanes)) - base);
    store(v * kLanes, power);
    sum += power;
  }
  *l = *l * factor + SumOfLanes(sum);
  return factor;
}

// out = keep * out + add * o, of `count` values.
inline void MixRowVec(int64_t count, float keep, float* out, float add, const float* o) {
  int64_t d = 0;
  for (; d + kLanes <= count; d += kLanes) {
    Store(out + d, Load(out + d) * keep + Load(o + d) * add);
  }
  for (; d < count; ++d) out[d] = out[d] * keep + o[d] * add;
}

// Of scores that lie one after the other.
template <typename StorePowers>
WRITESCOPE_INLINE float SoftmaxRow(float* scores, int count, float* m, float* l,
                                   const StorePowers& store) {
  return SoftmaxRowAt([scores](int i) { return scores + i; }, count, /*slack=*/0.0f, m, l, store);
}

}  // namespace
}  // namespace writescope::kernels
