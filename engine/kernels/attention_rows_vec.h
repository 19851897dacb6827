// What the vector kernels of attention do with rows, whatever they multiply with. Included by the
// files of one instruction set only; see simd_vec.h.
#pragma once

#include "engine/kernels/attention_partial_flat.h"
#include "engine/kernels/simd_vec.h"

namespace writescope::kernels {
namespace {

constexpr int kGroupRows = 4;
constexpr float kMinusInf = -__builtin_inff();

// Slots of `block` that a row sees.
inline int SeenTokens(const FlatAttentionArgs& args, const KvHeadBlock& block, int row) {
  if (args.visible == nullptr) return block.num_tokens;
  const int64_t seen = args.visible[row] - block.first_position;
  if (seen <= 0) return 0;
  return seen < block.num_tokens ? static_cast<int>(seen) : block.num_tokens;
}

// Calls body.template operator()<kRows>(row) for groups that cover [first, last).
template <typename Body>
inline void ForRowGroups(int first, int last, const Body& body) {
  int row = first;
  for (; row + kGroupRows <= last; row += kGroupRows) body.template operator()<kGroupRows>(row);
  if (row + 2 <= last) {
    body.template operator()<2>(row);
    row += 2;
  }
  if (row < last) body.template operator()<1>(row);
}

// Turns the first `count` scores of a row into 2^(score - m) and moves its running maximum and sum
// on. Returns the factor for what was summed before. Scores from `count` on are not read by anyone
// later.
inline float SoftmaxRow(float* scores, int count, float* m, float* l) {
  constexpr IntVec kLane = LaneNumbers(LaneIndices());
  const int num_vecs = (count + kLanes - 1) / kLanes;
  if (count % kLanes != 0) {
    float* last = scores + (num_vecs - 1) * kLanes;
    Store(last, kLane < count % kLanes ? Load(last) : Vec{} + kMinusInf);
  }
  Vec best = Vec{} + kMinusInf;
  for (int v = 0; v < num_vecs; ++v) {
    const Vec score = Load(scores + v * kLanes);
    best = score > best ? score : best;  // A NaN is passed over here; it comes back by its 2^NaN.
  }
  const float m_old = *m;
  const float block_max = MaxOfLanes(best);
  const float m_new = block_max > m_old ? block_max : m_old;
  const float base = m_new == kMinusInf ? 0.0f : m_new;  // (-inf) - (-inf) would be NaN.
  Vec sum = Vec{};
  for (int v = 0; v < num_vecs; ++v) {
    const Vec power = Exp2(Load(scores + v * kLanes) - base);
    Store(scores + v * kLanes, power);
    sum += power;
  }
  const float factor = m_new == m_old ? 1.0f : Exp2(Vec{} + (m_old - base))[0];
  *m = m_new;
  *l = *l * factor + SumOfLanes(sum);
  return factor;
}

}  // namespace
}  // namespace writescope::kernels
