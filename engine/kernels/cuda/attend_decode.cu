// Attention of few rows over many keys: bf16 tiles go from global memory into the registers of the
// tensor cores, and nothing is staged, shuffled or transposed. Each key is used by up to 16 (row,
// head) pairs, so the time is that of reading memory; registers hold the next keys while the
// present ones are in work.
#include "engine/kernels/cuda/attend_latent.h"
#include "engine/kernels/cuda/attend_launch.h"
#include "engine/kernels/cuda/attend_mma.h"
#include "engine/kernels/cuda/attend_slices.h"

namespace writescope::kernels {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarpLanes;
constexpr int kBlocksPerProcessor = 2;

template <int kKDim, int kVDim>
struct DecodeShared {
  static constexpr int kOutStride = kVDim + 8;  // Floats; rows start at different banks.
  Words4 q[kKDim / kStepDims][kWarpLanes];
  float o[kWarps][kPanelSlots][kOutStride];
  float m[kWarps][kPanelSlots];
  float l[kWarps][kPanelSlots];
  SliceQueue queue;
};

// What a warp keeps of the rows g and g + 8 of its lanes.
template <int kVDim>
struct WarpState {
  float o[kVDim / kGroupDims][4][4];
  float m[2];
  float l[2];  // Of this lane's tokens

  __device__ void Clear() {
#pragma unroll
    for (auto& group : o) {
#pragma unroll
      for (auto& product : group) {
#pragma unroll
        for (float& value : product) value = 0;
      }
    }
    m[0] = m[1] = kMinusInf;
    l[0] = l[1] = 0;
  }
};

template <int kKDim>
using UnitKeys = Words4[kKDim / kStepDims][2];
template <int kVDim>
using UnitValues = Words4[kVDim / kGroupDims][2][2];

// `unit` is at the first of its two K tiles.
template <int kKDim>
__device__ void LoadKeys(const std::byte* unit, int lane, UnitKeys<kKDim>& keys) {
  const std::byte* at = unit + KeyTile(lane) * (kTileTokens * kKDim * 2) +
                        KeyRow(lane, 0, 0) * kKeyRowBytes + KeyChunk(lane) * kChunkBytes;
#pragma unroll
  for (int step = 0; step < kKDim / kStepDims; ++step) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
      keys[step][r] = LoadStreamed(at + (8 * step + 4 * r) * kKeyRowBytes);
  }
}

// `unit` is at the first of its 16 pair rows.
template <int kVDim>
__device__ void LoadValues(const std::byte* unit, int lane, UnitValues<kVDim>& values) {
  const std::byte* at = unit + (ValueRow(lane, 0, 0) * kVDim + ValueDim(lane)) * 4;
#pragma unroll
  for (int group = 0; group < kVDim / kGroupDims; ++group) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        values[group][tile][r] =
            LoadStreamed(at + ((8 * tile + r) * kVDim + group * kGroupDims) * 4);
      }
    }
  }
}

// Scores become weights, and the state moves on to the new maxima. Tokens from limit[h] on are not
// seen by row g + 8 h.
template <int kVDim>
__device__ void Weigh(float (&s)[4][4], int lane, const int (&limit)[2], WarpState<kVDim>& state) {
  if (limit[0] < kUnitTokens || limit[1] < kUnitTokens) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (ScoreToken(lane, n, c) >= limit[c >> 1]) s[n][c] = kMinusInf;
      }
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float best = fmaxf(s[0][2 * h], s[0][2 * h + 1]);
#pragma unroll
    for (int n = 1; n < 4; ++n) best = fmaxf(best, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
    const float m_new = fmaxf(MaxOfQuad(best), state.m[h]);
    const float base = m_new == kMinusInf ? 0 : m_new;  // (-inf) - (-inf) would be NaN.
    const float factor = FastExp2(state.m[h] - base);
    state.m[h] = m_new;
    float sum = 0;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int c = 2 * h; c < 2 * h + 2; ++c) sum += s[n][c] = FastExp2(s[n][c] - base);
    }
    state.l[h] = state.l[h] * factor + sum;
#pragma unroll
    for (auto& group : state.o) {
#pragma unroll
      for (auto& product : group) {
        product[2 * h] *= factor;
        product[2 * h + 1] *= factor;
      }
    }
  }
}

// Where one warp's units of a slice lie: every kWarps-th.
template <int kKDim, int kVDim>
class SliceUnits {
 public:
  static constexpr int kKeyUnitBytes = kUnitTokens * kKDim * 2;
  static constexpr int kValueUnitBytes = kUnitTokens * kVDim * 2;

  __device__ SliceUnits(const SliceCall& call, const Slice& slice, int kv_head)
      : head_(slice.base + kv_head * call.rows.kv.head_bytes()),
        block_bytes_(call.rows.kv.block_bytes()),
        num_units_(slice.num_blocks == 0 ? 0 : (slice.num_tokens + kUnitTokens - 1) / kUnitTokens) {
  }
  __device__ int num_units() const { return num_units_; }
  __device__ const std::byte* Keys(int unit) const {
    return Block(unit) + unit % kUnitsPerBlock * kKeyUnitBytes;
  }
  __device__ const std::byte* Values(int unit) const {
    return Block(unit) + kUnitsPerBlock * kKeyUnitBytes + unit % kUnitsPerBlock * kValueUnitBytes;
  }

 private:
  __device__ const std::byte* Block(int unit) const {
    return head_ + unit / kUnitsPerBlock * block_bytes_;
  }

  const std::byte* head_;
  int64_t block_bytes_;
  int num_units_;
};

// Keys are asked for one unit ahead where registers suffice.
template <int kKDim>
constexpr bool kAhead = kKDim <= 128;

// Takes the warp through its units of a slice. With kAhead the first unit's keys have been asked
// for, and those of the warp's first unit in the slice after it are when this returns.
template <int kKDim, int kVDim>
__device__ void AttendUnits(const SliceUnits<kKDim, kVDim>& units,
                            const SliceUnits<kKDim, kVDim>& next_units, int warp, int lane,
                            const DecodeShared<kKDim, kVDim>& shared, const int (&slice_limit)[2],
                            UnitKeys<kKDim>& keys, WarpState<kVDim>& state) {
  const auto load_next_slice = [&] {
    if (warp < next_units.num_units()) LoadKeys<kKDim>(next_units.Keys(warp), lane, keys);
  };
  if (kAhead<kKDim> && warp >= units.num_units()) load_next_slice();
  for (int unit = warp; unit < units.num_units(); unit += kWarps) {
    if (!kAhead<kKDim>) LoadKeys<kKDim>(units.Keys(unit), lane, keys);
    UnitValues<kVDim> values;
    LoadValues<kVDim>(units.Values(unit), lane, values);
    float s[4][4] = {};
#pragma unroll
    for (int step = 0; step < kKDim / kStepDims; ++step) {
      const Words4 q = shared.q[step][lane];
#pragma unroll
      for (int n = 0; n < 4; ++n) Mma(s[n], q, keys[step][0].w[n], keys[step][1].w[n]);
    }
    if (kAhead<kKDim>) {
      if (unit + kWarps < units.num_units()) {
        LoadKeys<kKDim>(units.Keys(unit + kWarps), lane, keys);
      } else {
        load_next_slice();
      }
    }
    const int limit[2] = {slice_limit[0] - unit * kUnitTokens, slice_limit[1] - unit * kUnitTokens};
    Weigh<kVDim>(s, lane, limit, state);
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const Words4 p = PackWeights(s, tile);
#pragma unroll
      for (int group = 0; group < kVDim / kGroupDims; ++group) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          Mma(state.o[group][n], p, values[group][tile][0].w[n], values[group][tile][1].w[n]);
        }
      }
    }
  }
}

template <int kKDim, int kVDim>
__device__ void StoreWarp(WarpState<kVDim>& state, int warp, int lane,
                          DecodeShared<kKDim, kVDim>& shared) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int slot = AccumulatorRow(lane, 2 * h);
    const float l = SumOfQuad(state.l[h]);
    if (LaneT(lane) == 0) {
      shared.m[warp][slot] = state.m[h];
      shared.l[warp][slot] = l;
    }
#pragma unroll
    for (int group = 0; group < kVDim / kGroupDims; ++group) {
#pragma unroll
      for (int c = 2 * h; c < 2 * h + 2; ++c) {
        const int dim = group * kGroupDims + OutDim(lane, 0, c);
        const float(&o)[4][4] = state.o[group];
        *reinterpret_cast<float4*>(&shared.o[warp][slot][dim]) =
            make_float4(o[0][c], o[1][c], o[2][c], o[3][c]);
      }
    }
  }
}

// The warps' states together are the slice's partial.
template <int kKDim, int kVDim>
__device__ void StorePartial(const SliceCall& call, int64_t first_partial, int num_slots,
                             const DecodeShared<kKDim, kVDim>& shared) {
  constexpr int kVecs = kVDim / 4;
  for (int i = threadIdx.x; i < num_slots * kVecs; i += kThreads) {
    const int slot = i / kVecs;
    const int dim = i % kVecs * 4;
    float m = shared.m[0][slot];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) m = fmaxf(m, shared.m[w][slot]);
    const float base = m == kMinusInf ? 0 : m;
    float l = 0;
    float4 o = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float weight = FastExp2(shared.m[w][slot] - base);
      const float4 part = *reinterpret_cast<const float4*>(&shared.o[w][slot][dim]);
      l += weight * shared.l[w][slot];
      o.x += weight * part.x;
      o.y += weight * part.y;
      o.z += weight * part.z;
      o.w += weight * part.w;
    }
    const int64_t partial = first_partial + slot;
    *reinterpret_cast<float4*>(call.partials.o + partial * kVDim + dim) = o;
    if (dim == 0) {
      call.partials.m[partial] = m;
      call.partials.l[partial] = l;
    }
  }
}

template <int kKDim, int kVDim>
__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor)
    AttendDecodeKernel(const __grid_constant__ SliceCall call) {
  __shared__ DecodeShared<kKDim, kVDim> shared;
  const int kv_head = blockIdx.y;
  const int warp = threadIdx.x / kWarpLanes;
  const int lane = threadIdx.x % kWarpLanes;
  using Units = SliceUnits<kKDim, kVDim>;
  UnitKeys<kKDim> keys;
  const bool has_work = shared.queue.Begin(call, blockIdx.x);
  LetNextKernelBegin();
  WaitForKernelBefore();
  if (!has_work) return;
  if (const Units units(call, shared.queue.slices[0], kv_head);
      kAhead<kKDim> && warp < units.num_units()) {
    LoadKeys<kKDim>(units.Keys(warp), lane, keys);
  }
  for (int i = 0; shared.queue.slices[i % 2].num_blocks > 0; ++i) {
    const Slice& slice = shared.queue.slices[i % 2];
    shared.queue.LookAhead(call, i);
    const int num_slots = slice.panel->num_rows * slice.panel->num_heads;
    const float* q_rows[2] = {nullptr, nullptr};
    int limit[2];  // Of tokens of the slice that are seen; what the empty rows see is dropped.
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int slot = AccumulatorRow(lane, 2 * h);
      limit[h] = slice.num_tokens;
      if (slot >= num_slots) continue;
      q_rows[h] = call.rows.q + SlotState(call, slice, kv_head, slot) * kKDim;
      const int64_t seen = slice.rows[slot / slice.panel->num_heads].visible - slice.first_position;
      if (seen < limit[h]) limit[h] = static_cast<int>(seen);
    }
    for (int step = warp; step < kKDim / kStepDims; step += kWarps) {
      shared.q[step][lane] = LoadQueryFragment(q_rows[0], q_rows[1], lane, step);
    }
    __syncthreads();
    WarpState<kVDim> state;
    state.Clear();
    AttendUnits<kKDim, kVDim>(Units(call, slice, kv_head),
                              Units(call, shared.queue.slices[(i + 1) % 2], kv_head), warp, lane,
                              shared, limit, keys, state);
    StoreWarp<kKDim, kVDim>(state, warp, lane, shared);
    __syncthreads();
    StorePartial<kKDim, kVDim>(call, PartialIndex(call, shared.queue.sizes, slice.index, kv_head),
                               num_slots, shared);
    __syncthreads();
  }
}

template <int kKDim, int kVDim>
cudaError_t Launch(cudaStream_t stream, const SliceCall& call) {
  const int chunks = call.sizes.num_chunks < 1 ? 1 : call.sizes.num_chunks;
  const dim3 grid(chunks, call.rows.kv.num_kv_heads);
  return LaunchSlices(stream, &AttendDecodeKernel<kKDim, kVDim>, grid, kThreads, 0, call);
}

using Launcher = cudaError_t (*)(cudaStream_t, const SliceCall&);

Launcher FindLauncher(const KvGeometry& kv) {
  if (kv.dtype != KvDtype::kBf16 || kv.value_in_key) return nullptr;
  if (kv.k_dim == 192 && kv.v_dim == 128) return Launch<192, 128>;
  if (kv.k_dim != kv.v_dim) return nullptr;
  switch (kv.k_dim) {
    case 32:
      return Launch<32, 32>;
    case 64:
      return Launch<64, 64>;
    case 96:
      return Launch<96, 96>;
    case 128:
      return Launch<128, 128>;
    default:
      return nullptr;
  }
}

}  // namespace

SliceKernel DecodeKernel(const KvGeometry& kv) {
  if (kv.value_in_key) return LatentDecodeKernel(kv);
  SliceKernel kernel;
  kernel.launch = FindLauncher(kv);
  kernel.blocks_per_processor = kBlocksPerProcessor;
  kernel.min_chunk_blocks = kWarps / kUnitsPerBlock;
  return kernel;
}

}  // namespace writescope::kernels
