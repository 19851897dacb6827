// A lane's rows in the accumulators of warpgroup products: their states, what they see of an item,
// and scores that become weights. Included by .cu files only.
#pragma once

#include "engine/kernels/cuda/attend_mma.h"
#include "engine/kernels/cuda/attend_operands.h"
#include "engine/kernels/cuda/attend_tiles.h"

namespace writescope::kernels {

// An *item* is what rows see at a time.
inline constexpr int kItemBlocks = 2;
inline constexpr int kItemTokens = kItemBlocks * kBlockTokens;

// Of the lane's rows, g and g + 8 of its warp's 16.
struct RowState {
  float o[64];
  float m[2];
  float l[2];  // Of this lane's tokens
};

__device__ inline void LoadState(const AttendRows& rows, const RowTile& tile, int first_row,
                                 int lane, RowState& state) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = first_row + AccumulatorRow(lane, 2 * h);
    const bool valid = row < tile.num_pairs;
    const int64_t at = valid ? tile.State(rows, row) : 0;
    state.m[h] = valid ? rows.m[at] : kMinusInf;
    state.l[h] = valid && LaneT(lane) == 0 ? rows.l[at] : 0;
#pragma unroll
    for (int j = 0; j < kOperandDims / 8; ++j) {
      float2 o = make_float2(0, 0);
      if (state.m[h] != kMinusInf) {
        o = *reinterpret_cast<const float2*>(rows.o + at * kOperandDims +
                                             ProductColumn(lane, 4 * j));
      }
      state.o[4 * j + 2 * h] = o.x;
      state.o[4 * j + 2 * h + 1] = o.y;
    }
  }
}

__device__ inline void StoreState(const RowState& state, const RowTile& tile, int first_row,
                                  int lane, const AttendRows& rows) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float l = SumOfQuad(state.l[h]);
    const int row = first_row + AccumulatorRow(lane, 2 * h);
    if (row >= tile.num_pairs) continue;
    const int64_t at = tile.State(rows, row);
    if (LaneT(lane) == 0) {
      rows.m[at] = state.m[h];
      rows.l[at] = l;
    }
#pragma unroll
    for (int j = 0; j < kOperandDims / 8; ++j) {
      *reinterpret_cast<float2*>(rows.o + at * kOperandDims + ProductColumn(lane, 4 * j)) =
          make_float2(state.o[4 * j + 2 * h], state.o[4 * j + 2 * h + 1]);
    }
  }
}

// Tokens of an item that the lane's rows do not see, or that are none.
__device__ inline void Mask(float (&s)[64], const BlockPlace (&blocks)[kItemBlocks], int lane,
                            const int (&visible)[2]) {
#pragma unroll
  for (int b = 0; b < kItemBlocks; ++b) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int seen = visible[h] - blocks[b].first_position;
      const int limit = seen < blocks[b].num_tokens ? seen : blocks[b].num_tokens;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          if (ProductColumn(lane, 4 * j + c) >= limit) s[32 * b + 4 * j + 2 * h + c] = kMinusInf;
        }
      }
    }
  }
}

// Scores become weights, the maxima and sums move on; `factors` is what the output is to be
// multiplied with. True where any lane's is not one.
__device__ inline bool Weigh(float (&s)[64], RowState& state, float (&factors)[2]) {
  bool moved = false;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float best[2] = {s[2 * h], s[2 * h + 1]};
#pragma unroll
    for (int j = 1; j < 16; ++j) {
      best[0] = fmaxf(best[0], s[4 * j + 2 * h]);
      best[1] = fmaxf(best[1], s[4 * j + 2 * h + 1]);
    }
    const float m_new = fmaxf(MaxOfQuad(fmaxf(best[0], best[1])), state.m[h]);
    const float base = m_new == kMinusInf ? 0 : m_new;  // (-inf) - (-inf) would be NaN.
    factors[h] = FastExp2(state.m[h] - base);
    moved |= state.m[h] != m_new;
    state.m[h] = m_new;
    float sum[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      sum[0] += s[4 * j + 2 * h] = FastExp2(s[4 * j + 2 * h] - base);
      sum[1] += s[4 * j + 2 * h + 1] = FastExp2(s[4 * j + 2 * h + 1] - base);
    }
    state.l[h] = state.l[h] * factors[h] + (sum[0] + sum[1]);
  }
  return __any_sync(~0u, moved);
}

__device__ inline void Rescale(const float (&factors)[2], RowState& state) {
#pragma unroll
  for (int i = 0; i < 64; ++i) state.o[i] *= factors[i / 2 % 2];
}

// Weights of 128 tokens as A operands of 16 tokens each.
__device__ inline void PackItem(const float (&s)[64], uint32_t (&p)[8][4]) {
#pragma unroll
  for (int step = 0; step < 8; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      p[step][i] = PackBf16(s[WeightIndex(step, i, 0)], s[WeightIndex(step, i, 1)]);
    }
  }
}

}  // namespace writescope::kernels
