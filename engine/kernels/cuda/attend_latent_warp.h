// What the warps of a thread block do where the value is the first part of the key (MLA). 512
// output dims do not fit into the registers of one warp, so a thread block takes turns: in the
// first half of a block's work the warps share the scores out by rows and tokens, in the second
// half each takes all rows for some output dims. Weights go from one half to the other through
// shared memory, as the fragments that they are. Included by .cu files only.
#pragma once

#include "engine/kernels/cuda/attend_mma.h"
#include "engine/kernels/cuda/attend_work.h"

namespace writescope::kernels::latent {

inline constexpr int kKDim = 576;
inline constexpr int kVDim = 512;
inline constexpr int kMmaRows = 16;
inline constexpr int kSteps = kKDim / kStepDims;
inline constexpr int kLatentTileBytes = kTileTokens * kKDim * 2;
inline constexpr int kLatentBlockBytes = kTilesPerBlock * kLatentTileBytes;
inline constexpr int kStages = 2;

// kMmas x 16 rows. Scores: a warp for each 16 rows and unit of a block, or kSplit of them, which
// divide the key's dims.
template <int kMmas, int kSplit>
struct Shared {
  static constexpr int kWarps = kMmas * kUnitsPerBlock * kSplit;
  static constexpr int kThreads = kWarps * kWarpLanes;
  std::byte stages[kStages][kLatentBlockBytes];
  Words4 q[kMmas][kSteps][kWarpLanes];
  Words4 weights[kMmas][kTilesPerBlock][kWarpLanes];
  // Scores of the warps that have the later dims.
  float4 scores[kSplit > 1 ? kMmas* kUnitsPerBlock * 4 : 1][kWarpLanes];
  float unit_max[kUnitsPerBlock][kMmas][kMmaRows];
  float factor[kMmas][kMmaRows];  // Of what was summed before
};

// What one warp does and keeps.
template <int kMmas, int kSplit>
class Warp {
 public:
  using S = Shared<kMmas, kSplit>;
  static constexpr int kDims = kVDim / S::kWarps;  // Of the output, of all rows
  static constexpr int kGroups = kDims / 16;

  __device__ explicit Warp(S& shared)
      : shared_(shared),
        lane_(threadIdx.x % kWarpLanes),
        mma_(threadIdx.x / kWarpLanes % kMmas),
        unit_(threadIdx.x / kWarpLanes / kMmas % kUnitsPerBlock),
        split_(threadIdx.x / kWarpLanes / kMmas / kUnitsPerBlock),
        first_dim_(threadIdx.x / kWarpLanes * kDims) {}

  // Rows g (0) and g + 8 (1) of the warp's scores.
  __device__ int ScoreRow(int half) const {
    return mma_ * kMmaRows + AccumulatorRow(lane_, 2 * half);
  }
  __device__ bool scores() const { return split_ == 0; }

  // `row` gives the queries of a row, or null.
  template <typename Row>
  __device__ void StageQueries(const Row& row) {
    const float* rows[2] = {row(ScoreRow(0)), row(ScoreRow(1))};
    constexpr int kOthers = kUnitsPerBlock * kSplit;
    for (int step = unit_ + split_ * kUnitsPerBlock; step < kSteps; step += kOthers) {
      shared_.q[mma_][step][lane_] = LoadQueryFragment(rows[0], rows[1], lane_, step);
    }
  }

  // `state` gives the index of a row's state, or -1.
  template <typename State>
  __device__ void Load(const State& state, const float* o, const float* m, const float* l) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t at = state(ScoreRow(h));
      m_[h] = at >= 0 ? m[at] : kMinusInf;
      l_[h] = at >= 0 && unit_ == 0 && LaneT(lane_) == 0 ? l[at] : 0;
    }
#pragma unroll
    for (int i = 0; i < kMmas; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int64_t at = state(i * kMmaRows + AccumulatorRow(lane_, 2 * h));
        const bool any = at >= 0 && m[at] != kMinusInf;
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          float4 four = make_float4(0, 0, 0, 0);
          if (any) four = *reinterpret_cast<const float4*>(o + at * kVDim + OutAt(group));
          o_[i][group][0][2 * h] = four.x;
          o_[i][group][1][2 * h] = four.y;
          o_[i][group][0][2 * h + 1] = four.z;
          o_[i][group][1][2 * h + 1] = four.w;
        }
      }
    }
  }

  __device__ void Clear() {
    Load([](int) { return int64_t{-1}; }, nullptr, nullptr, nullptr);
  }

  // `index` as in Load. All warps of the thread block.
  template <typename State>
  __device__ void Store(const State& index, float* o, float* m, float* l) {
    const float sums[2] = {SumOfQuad(l_[0]), SumOfQuad(l_[1])};
    if (scores() && LaneT(lane_) == 0) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        shared_.unit_max[unit_][mma_][AccumulatorRow(lane_, 2 * h)] = sums[h];
      }
    }
    __syncthreads();
    if (scores() && unit_ == 0 && LaneT(lane_) == 0) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int64_t at = index(ScoreRow(h));
        if (at < 0) continue;
        const int row = AccumulatorRow(lane_, 2 * h);
        m[at] = m_[h];
        l[at] = shared_.unit_max[0][mma_][row] + shared_.unit_max[1][mma_][row];
      }
    }
#pragma unroll
    for (int i = 0; i < kMmas; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int64_t at = index(i * kMmaRows + AccumulatorRow(lane_, 2 * h));
        if (at < 0) continue;
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          const float(&out)[2][4] = o_[i][group];
          *reinterpret_cast<float4*>(o + at * kVDim + OutAt(group)) =
              make_float4(out[0][2 * h], out[1][2 * h], out[0][2 * h + 1], out[1][2 * h + 1]);
        }
      }
    }
    __syncthreads();
  }

  // One staged block. Tokens from limit(row) on are not seen; with `masked` false all are. All
  // warps of the thread block.
  template <typename Limit>
  __device__ void Attend(int stage, bool masked, const Limit& limit) {
    float s[4][4] = {};
    Score(stage, s);
    if constexpr (kSplit > 1) AddScores(s);
    if (scores()) {
      if (masked) {
        Mask(s, limit(ScoreRow(0)), 0);
        Mask(s, limit(ScoreRow(1)), 1);
      }
      ShareMaxima(s);
    }
    __syncthreads();
    if (scores()) Weigh(s);
    __syncthreads();
    AddValues(stage);
  }

 private:
  __device__ int OutAt(int group) const {
    return first_dim_ + group * 16 + LatentOutDim(lane_, 0, 0);
  }

  __device__ void Score(int stage, float (&s)[4][4]) {
    constexpr int kSplitSteps = kSteps / kSplit;
    static_assert(kSplitSteps * kSplit == kSteps);
    const int tile = unit_ * 2 + KeyTile(lane_);
    const int row = KeyRow(lane_, split_ * kSplitSteps, 0);
    const uint32_t at = SharedAddress(shared_.stages[stage]) + tile * kLatentTileBytes +
                        row * kKeyRowBytes +
                        SwizzleKeyChunk(tile, row, KeyChunk(lane_)) * kChunkBytes;
    const Words4(*q)[kWarpLanes] = &shared_.q[mma_][split_ * kSplitSteps];
#pragma unroll 6
    for (int step = 0; step < kSplitSteps; ++step) {
      const Words4 a = q[step][lane_];
      const Words4 b0 = LoadShared(at + 8 * step * kKeyRowBytes);
      const Words4 b1 = LoadShared(at + (8 * step + 4) * kKeyRowBytes);
#pragma unroll
      for (int n = 0; n < 4; ++n) Mma(s[n], a, b0.w[n], b1.w[n]);
    }
  }

  __device__ void AddScores(float (&s)[4][4]) {
    static_assert(kSplit <= 2);
    float4(*at)[kWarpLanes] = &shared_.scores[(mma_ * kUnitsPerBlock + unit_) * 4];
    if (split_ == 1) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        at[n][lane_] = make_float4(s[n][0], s[n][1], s[n][2], s[n][3]);
      }
    }
    __syncthreads();
    if (split_ == 0) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float4 other = at[n][lane_];
        s[n][0] += other.x;
        s[n][1] += other.y;
        s[n][2] += other.z;
        s[n][3] += other.w;
      }
    }
  }

  __device__ void Mask(float (&s)[4][4], int limit, int half) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int c = 2 * half; c < 2 * half + 2; ++c) {
        if (unit_ * kUnitTokens + ScoreToken(lane_, n, c) >= limit) s[n][c] = kMinusInf;
      }
    }
  }

  __device__ void ShareMaxima(const float (&s)[4][4]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float best = kMinusInf;
#pragma unroll
      for (int n = 0; n < 4; ++n) best = fmaxf(best, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
      best = MaxOfQuad(best);
      if (LaneT(lane_) == 0) shared_.unit_max[unit_][mma_][AccumulatorRow(lane_, 2 * h)] = best;
    }
  }

  __device__ void Weigh(float (&s)[4][4]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = AccumulatorRow(lane_, 2 * h);
      const float block_max = fmaxf(shared_.unit_max[0][mma_][row], shared_.unit_max[1][mma_][row]);
      const float m_new = fmaxf(m_[h], block_max);
      const float base = m_new == kMinusInf ? 0 : m_new;  // (-inf) - (-inf) would be NaN.
      const float factor = FastExp2(m_[h] - base);
      m_[h] = m_new;
      float sum = 0;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int c = 2 * h; c < 2 * h + 2; ++c) sum += s[n][c] = FastExp2(s[n][c] - base);
      }
      l_[h] = l_[h] * factor + sum;
      if (unit_ == 0 && LaneT(lane_) == 0) shared_.factor[mma_][row] = factor;
    }
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      shared_.weights[mma_][unit_ * 2 + tile][lane_] = PackWeights(s, tile);
    }
  }

  __device__ void AddValues(int stage) {
#pragma unroll
    for (int i = 0; i < kMmas; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float factor = shared_.factor[i][AccumulatorRow(lane_, 2 * h)];
        // Maxima soon stop moving.
        if (!__any_sync(~0u, factor != 1)) continue;
#pragma unroll
        for (auto& group : o_[i]) {
#pragma unroll
          for (auto& product : group) {
            product[2 * h] *= factor;
            product[2 * h + 1] *= factor;
          }
        }
      }
    }
    const uint32_t staged = SharedAddress(shared_.stages[stage]);
#pragma unroll
    for (int tile = 0; tile < kTilesPerBlock; ++tile) {
      Words4 p[kMmas];
#pragma unroll
      for (int i = 0; i < kMmas; ++i) p[i] = shared_.weights[i][tile][lane_];
      const uint32_t at = staged + tile * kLatentTileBytes +
                          (first_dim_ / 2 + LatentRow(lane_)) * kKeyRowBytes +
                          SwizzleKeyChunk(tile, LatentRow(lane_), LatentChunk(lane_)) * kChunkBytes;
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const Words4 words = LoadShared(at + group * 8 * kKeyRowBytes);
#pragma unroll
        for (int product = 0; product < 2; ++product) {
          const unsigned selector = LatentSelector(product);
          const uint32_t b0 = PermuteBytes(words.w[0], words.w[1], selector);
          const uint32_t b1 = PermuteBytes(words.w[2], words.w[3], selector);
#pragma unroll
          for (int i = 0; i < kMmas; ++i) Mma(o_[i][group][product], p[i], b0, b1);
        }
      }
    }
  }

  S& shared_;
  const int lane_;
  const int mma_;  // Of the scores: which 16 rows
  const int unit_;
  const int split_;
  const int first_dim_;
  float m_[2];
  float l_[2];  // Of this lane's tokens
  float o_[kMmas][kGroups][2][4];
};

}  // namespace writescope::kernels::latent
