// Attention of many rows of a reader: bf16, keys and values staged through shared memory. A warp
// holds 32 (row, head) pairs, so each word that it reads from shared memory feeds two MMAs; with 16
// the reads would take longer than the products. Two thread blocks on a multiprocessor overlap
// one's softmax with the other's products.
#include "engine/kernels/cuda/attend_latent.h"
#include "engine/kernels/cuda/attend_launch.h"
#include "engine/kernels/cuda/attend_mma.h"
#include "engine/kernels/cuda/attend_tiles.h"

namespace writescope::kernels {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarpLanes;
constexpr int kMmaRows = 16;
constexpr int kWarpMmas = 2;  // Of 16 rows each
constexpr int kWarpRows = kWarpMmas * kMmaRows;
constexpr int kTileRows = kWarps * kWarpRows;
constexpr int kProducts = kBlockTokens / 8;  // Of a block's scores
constexpr int kStages = 2;

template <int kKDim, int kVDim>
struct Layout {
  static constexpr int kSteps = kKDim / kStepDims;
  static constexpr int kGroups = kVDim / kGroupDims;
  static constexpr int kKeyTileBytes = kTileTokens * kKDim * 2;
  static constexpr int kKeyPlaneBytes = kBlockTokens * kKDim * 2;
  static constexpr int kValuePlaneBytes = kBlockTokens * kVDim * 2;
  static constexpr int kStageBytes = kKeyPlaneBytes + kValuePlaneBytes;
  static constexpr int kQueryBytes = kTileRows * kKDim * 2;  // Fragments [mma][step][lane]
  static constexpr int kSharedBytes = kQueryBytes + kStages * kStageBytes;
};

// Copies one head of a block to a stage, swizzled.
template <int kKDim, int kVDim>
__device__ void CopyBlock(const std::byte* k, uint32_t stage) {
  using L = Layout<kKDim, kVDim>;
  constexpr int kKeyChunks = L::kKeyPlaneBytes / kChunkBytes;
  constexpr int kRowChunks = kKeyRowBytes / kChunkBytes;
  constexpr int kTileRowsOfK = kKDim / 2;
#pragma unroll
  for (int i = 0; i < kKeyChunks / kThreads; ++i) {
    const int at = i * kThreads + threadIdx.x;
    const int row = at / kRowChunks;  // Of the plane
    const int chunk = SwizzleKeyChunk(row / kTileRowsOfK, row % kTileRowsOfK, at % kRowChunks);
    CopyAsync16(stage + row * kKeyRowBytes + chunk * kChunkBytes, k + at * kChunkBytes);
  }
  constexpr int kValueChunks = L::kValuePlaneBytes / kChunkBytes;
  constexpr int kValueRowChunks = kVDim * 4 / kChunkBytes;
  const std::byte* v = k + L::kKeyPlaneBytes;
#pragma unroll
  for (int i = 0; i < kValueChunks / kThreads; ++i) {
    const int at = i * kThreads + threadIdx.x;
    const int row = at / kValueRowChunks;
    const int chunk = SwizzleValueChunk(row, at % kValueRowChunks);
    CopyAsync16(stage + L::kKeyPlaneBytes + (row * kValueRowChunks + chunk) * kChunkBytes,
                v + at * kChunkBytes);
  }
}

// Of the rows g and g + 8 of each of the warp's MMAs: index 2 * mma + half.
template <int kVDim>
struct WarpState {
  float o[kWarpMmas][kVDim / kGroupDims][4][4];
  float m[2 * kWarpMmas];
  float l[2 * kWarpMmas];  // Of this lane's tokens
};

// Scores of the warp's rows against a block: product 4 u + n is product n of unit u.
template <int kKDim, int kVDim>
__device__ void Score(const Words4* q, uint32_t keys, int lane,
                      float (&s)[kWarpMmas][kProducts][4]) {
  using L = Layout<kKDim, kVDim>;
  // A row's swizzle depends on the lane alone: steps and r move it by multiples of 4.
  const uint32_t at =
      keys + KeyTile(lane) * L::kKeyTileBytes + KeyRow(lane, 0, 0) * kKeyRowBytes +
      SwizzleKeyChunk(KeyTile(lane), KeyRow(lane, 0, 0), KeyChunk(lane)) * kChunkBytes;
#pragma unroll
  for (int step = 0; step < L::kSteps; ++step) {
    Words4 a[kWarpMmas];
#pragma unroll
    for (int i = 0; i < kWarpMmas; ++i) a[i] = q[(i * L::kSteps + step) * kWarpLanes + lane];
#pragma unroll
    for (int unit = 0; unit < kUnitsPerBlock; ++unit) {
      const uint32_t row = at + unit * 2 * L::kKeyTileBytes + 8 * step * kKeyRowBytes;
      const Words4 b0 = LoadShared(row);
      const Words4 b1 = LoadShared(row + 4 * kKeyRowBytes);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int i = 0; i < kWarpMmas; ++i) Mma(s[i][4 * unit + n], a[i], b0.w[n], b1.w[n]);
      }
    }
  }
}

// Tokens from limit on are not seen by the row.
__device__ inline void Mask(float (&s)[kProducts][4], int lane, int half, int limit) {
#pragma unroll
  for (int product = 0; product < kProducts; ++product) {
#pragma unroll
    for (int c = 2 * half; c < 2 * half + 2; ++c) {
      const int token = product / 4 * kUnitTokens + ScoreToken(lane, product % 4, c);
      if (token >= limit) s[product][c] = kMinusInf;
    }
  }
}

// Scores become weights; the state moves on to the new maxima.
template <int kVDim>
__device__ void Weigh(float (&s)[kWarpMmas][kProducts][4], WarpState<kVDim>& state) {
#pragma unroll
  for (int i = 0; i < kWarpMmas; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = 2 * i + h;
      float best = kMinusInf;
#pragma unroll
      for (int product = 0; product < kProducts; ++product) {
        best = fmaxf(best, fmaxf(s[i][product][2 * h], s[i][product][2 * h + 1]));
      }
      const float m_new = fmaxf(MaxOfQuad(best), state.m[row]);
      const float base = m_new == kMinusInf ? 0 : m_new;  // (-inf) - (-inf) would be NaN.
      const float factor = FastExp2(state.m[row] - base);
      const bool moved = state.m[row] != m_new;
      state.m[row] = m_new;
      float sum = 0;
#pragma unroll
      for (int product = 0; product < kProducts; ++product) {
#pragma unroll
        for (int c = 2 * h; c < 2 * h + 2; ++c) {
          sum += s[i][product][c] = FastExp2(s[i][product][c] - base);
        }
      }
      state.l[row] = state.l[row] * factor + sum;
      // Maxima soon stop moving.
      if (!__any_sync(~0u, moved)) continue;
#pragma unroll
      for (auto& group : state.o[i]) {
#pragma unroll
        for (auto& product : group) {
          product[2 * h] *= factor;
          product[2 * h + 1] *= factor;
        }
      }
    }
  }
}

template <int kKDim, int kVDim>
__device__ void AddValues(const float (&s)[kWarpMmas][kProducts][4], uint32_t values, int lane,
                          WarpState<kVDim>& state) {
  using L = Layout<kKDim, kVDim>;
  constexpr int kRowBytes = kVDim * 4;
#pragma unroll
  for (int unit = 0; unit < kUnitsPerBlock; ++unit) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      Words4 p[kWarpMmas];
#pragma unroll
      for (int i = 0; i < kWarpMmas; ++i) p[i] = PackWeights(&s[i][4 * unit], tile);
      // Rows 2t and 2t + 1 have the same swizzle, which touches the chunk's three low bits; groups
      // of 32 dims are 8 chunks.
      const int row = 16 * unit + ValueRow(lane, tile, 0);
      const uint32_t at =
          values + row * kRowBytes + SwizzleValueChunk(row, ValueDim(lane) / 4) * kChunkBytes;
#pragma unroll
      for (int group = 0; group < L::kGroups; ++group) {
        const Words4 b0 = LoadShared(at + group * kGroupDims * 4);
        const Words4 b1 = LoadShared(at + group * kGroupDims * 4 + kRowBytes);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
#pragma unroll
          for (int i = 0; i < kWarpMmas; ++i) Mma(state.o[i][group][n], p[i], b0.w[n], b1.w[n]);
        }
      }
    }
  }
}

template <int kVDim>
__device__ void LoadState(const AttendRows& rows, const RowTile& tile, int warp_row, int lane,
                          WarpState<kVDim>& state) {
#pragma unroll
  for (int i = 0; i < kWarpMmas; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = warp_row + kMmaRows * i + AccumulatorRow(lane, 2 * h);
      const bool valid = row < tile.num_pairs;
      const int64_t at = valid ? tile.State(rows, row) : 0;
      state.m[2 * i + h] = valid ? rows.m[at] : kMinusInf;
      state.l[2 * i + h] = valid && LaneT(lane) == 0 ? rows.l[at] : 0;
#pragma unroll
      for (int group = 0; group < kVDim / kGroupDims; ++group) {
#pragma unroll
        for (int c = 2 * h; c < 2 * h + 2; ++c) {
          float4 o = make_float4(0, 0, 0, 0);
          if (state.m[2 * i + h] != kMinusInf) {
            o = *reinterpret_cast<const float4*>(rows.o + at * kVDim + group * kGroupDims +
                                                 OutDim(lane, 0, c));
          }
          state.o[i][group][0][c] = o.x;
          state.o[i][group][1][c] = o.y;
          state.o[i][group][2][c] = o.z;
          state.o[i][group][3][c] = o.w;
        }
      }
    }
  }
}

template <int kVDim>
__device__ void StoreState(const WarpState<kVDim>& state, const RowTile& tile, int warp_row,
                           int lane, const AttendRows& rows) {
#pragma unroll
  for (int i = 0; i < kWarpMmas; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float l = SumOfQuad(state.l[2 * i + h]);
      const int row = warp_row + kMmaRows * i + AccumulatorRow(lane, 2 * h);
      if (row >= tile.num_pairs) continue;
      const int64_t at = tile.State(rows, row);
      if (LaneT(lane) == 0) {
        rows.m[at] = state.m[2 * i + h];
        rows.l[at] = l;
      }
#pragma unroll
      for (int group = 0; group < kVDim / kGroupDims; ++group) {
        const float(&o)[4][4] = state.o[i][group];
#pragma unroll
        for (int c = 2 * h; c < 2 * h + 2; ++c) {
          *reinterpret_cast<float4*>(rows.o + at * kVDim + group * kGroupDims +
                                     OutDim(lane, 0, c)) =
              make_float4(o[0][c], o[1][c], o[2][c], o[3][c]);
        }
      }
    }
  }
}

// Query fragments of the warp's rows; read by this warp only.
template <int kKDim, int kVDim>
__device__ void StageQueries(const AttendRows& rows, const RowTile& tile, int warp_row, int lane,
                             Words4* q) {
  using L = Layout<kKDim, kVDim>;
#pragma unroll
  for (int i = 0; i < kWarpMmas; ++i) {
    const float* q_rows[2] = {nullptr, nullptr};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = warp_row + kMmaRows * i + AccumulatorRow(lane, 2 * h);
      if (row < tile.num_pairs) q_rows[h] = rows.q + tile.State(rows, row) * kKDim;
    }
#pragma unroll 4
    for (int step = 0; step < L::kSteps; ++step) {
      q[(i * L::kSteps + step) * kWarpLanes + lane] =
          LoadQueryFragment(q_rows[0], q_rows[1], lane, step);
    }
  }
}

template <int kKDim, int kVDim>
__device__ void AttendBlock(const HeadBlock& block, const RowTile& tile, int warp_row, int lane,
                            const Words4* q, uint32_t stage, WarpState<kVDim>& state) {
  float s[kWarpMmas][kProducts][4] = {};
  Score<kKDim, kVDim>(q, stage, lane, s);
  // Rows of a tile are in the order of positions: the first sees the least.
  if (block.num_tokens < kBlockTokens ||
      tile.Position(warp_row) < block.first_position + kBlockTokens - 1) {
#pragma unroll
    for (int i = 0; i < kWarpMmas; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = warp_row + kMmaRows * i + AccumulatorRow(lane, 2 * h);
        const int64_t seen = tile.Position(row) + 1 - block.first_position;
        const int limit = seen < block.num_tokens ? static_cast<int>(seen) : block.num_tokens;
        Mask(s[i], lane, h, limit);
      }
    }
  }
  Weigh<kVDim>(s, state);
  AddValues<kKDim, kVDim>(s, stage + Layout<kKDim, kVDim>::kKeyPlaneBytes, lane, state);
}

template <int kKDim, int kVDim>
__global__ void __launch_bounds__(kThreads, 2)
    AttendPrefillKernel(const __grid_constant__ TileCall call) {
  using L = Layout<kKDim, kVDim>;
  if (static_cast<int>(blockIdx.y) >= call.sizes.num_tiles) return;
  extern __shared__ __align__(128) std::byte shared_bytes[];
  const int warp = threadIdx.x / kWarpLanes;
  const int lane = threadIdx.x % kWarpLanes;
  const int warp_row = warp * kWarpRows;
  // Later tiles see more keys: they begin first.
  const RowTile tile =
      FindRowTile(call, call.sizes.num_tiles - 1 - blockIdx.y, kTileRows, blockIdx.x);
  const uint32_t stages = SharedAddress(shared_bytes) + L::kQueryBytes;

  __shared__ BlockQueue queue;
  queue.Begin(call, tile);
  if (queue.blocks[0].k == nullptr) return;
  CopyBlock<kKDim, kVDim>(queue.blocks[0].k, stages);
  CommitCopies();
  Words4* q = reinterpret_cast<Words4*>(shared_bytes) + warp * kWarpMmas * L::kSteps * kWarpLanes;
  StageQueries<kKDim, kVDim>(call.rows, tile, warp_row, lane, q);
  WarpState<kVDim> state;
  LoadState<kVDim>(call.rows, tile, warp_row, lane, state);
  for (int i = 0; queue.blocks[i % 3].k != nullptr; ++i) {
    const HeadBlock& next = queue.blocks[(i + 1) % 3];
    if (next.k != nullptr) {
      CopyBlock<kKDim, kVDim>(next.k, stages + (i + 1) % kStages * L::kStageBytes);
    }
    CommitCopies();
    WaitCopies<1>();
    __syncthreads();
    queue.LookAhead(i);
    AttendBlock<kKDim, kVDim>(queue.blocks[i % 3], tile, warp_row, lane, q,
                              stages + i % kStages * L::kStageBytes, state);
    __syncthreads();
  }
  StoreState<kVDim>(state, tile, warp_row, lane, call.rows);
}

template <int kKDim, int kVDim>
cudaError_t Prepare() {
  return cudaFuncSetAttribute(AttendPrefillKernel<kKDim, kVDim>,
                              cudaFuncAttributeMaxDynamicSharedMemorySize,
                              Layout<kKDim, kVDim>::kSharedBytes);
}

template <int kKDim, int kVDim>
cudaError_t Launch(cudaStream_t stream, const TileCall& call) {
  const int tiles = call.sizes.num_tiles < 1 ? 1 : call.sizes.num_tiles;
  const dim3 grid(call.rows.kv.num_kv_heads, tiles);
  AttendPrefillKernel<kKDim, kVDim>
      <<<grid, kThreads, Layout<kKDim, kVDim>::kSharedBytes, stream>>>(call);
  return cudaGetLastError();
}

template <int kKDim, int kVDim>
TileKernel Make() {
  TileKernel kernel;
  kernel.prepare = Prepare<kKDim, kVDim>;
  kernel.launch = Launch<kKDim, kVDim>;
  kernel.shared_bytes = Layout<kKDim, kVDim>::kSharedBytes + sizeof(BlockQueue);
  kernel.tile_rows = kTileRows;
  return kernel;
}

}  // namespace

TileKernel PrefillKernel(const KvGeometry& kv) {
  if (kv.value_in_key) return LatentPrefillKernel(kv);
  if (kv.dtype != KvDtype::kBf16) return TileKernel();
  if (kv.k_dim == 192 && kv.v_dim == 128) return Make<192, 128>();
  if (kv.k_dim != kv.v_dim) return TileKernel();
  switch (kv.k_dim) {
    case 32:
      return Make<32, 32>();
    case 64:
      return Make<64, 64>();
    case 96:
      return Make<96, 96>();
    case 128:
      return Make<128, 128>();
    default:
      return TileKernel();
  }
}

}  // namespace writescope::kernels
