// Many slots to an expert, 4-bit weights, sm_90a. Two warpgroups multiply 128 rows of weights each
// (64 of gate and 64 of up) by up to 128 slots: weights come packed and go through registers,
// values lie swizzled in shared memory, where the tensor cores read them. A third warpgroup fetches
// both. The grid is what fits on the GPU at once, and the ring goes on from one unit of work to the
// next.
#include "engine/kernels/cuda/async_copy.h"
#include "engine/kernels/cuda/expert_gemm.h"
#include "engine/kernels/cuda/launch.h"
#include "engine/kernels/cuda/tensor_core.h"
#include "engine/kernels/cuda/values.h"
#include "engine/kernels/cuda/warpgroup_mma.h"
#include "engine/kernels/quantize_int4.h"

namespace writescope::kernels {
namespace {

constexpr int kStages = 3;
constexpr int kRowTiles = kWideRows / kInt4TileRows;  // Of a unit
constexpr int kQuantBytes = kInt4GroupWords * 4;      // Of a row tile's group
constexpr int kScaleBytes = kInt4TileRows * 2;
constexpr int kPanelBytes = kWideSlots * 128;  // Values of 64 columns; a group is two panels.
constexpr int kWeightsAt = 2 * kPanelBytes;
constexpr int kScalesAt = kWeightsAt + kRowTiles * kQuantBytes;
constexpr int kStageBytes = kScalesAt + 1024;
static_assert(kStageBytes % 1024 == 0 && kRowTiles * kScaleBytes <= 1024);
constexpr int kOutAt = kStages * kStageBytes;
constexpr int kOutStride = kWideRows + 8;
constexpr int kBarriersAt = kOutAt + kWideSlots * kOutStride * 2;
constexpr int kSharedBytes = kBarriersAt + 2 * kStages * 8;

constexpr int kMultipliers = 256;  // Threads
constexpr int kFetchers = 128;
constexpr int kThreads = kMultipliers + kFetchers;
// Of a thread, once the roles are clear; together what the block was given.
constexpr int kMultiplierRegisters = 224, kFetcherRegisters = 56;
static_assert(kMultiplierRegisters * kMultipliers + kFetcherRegisters * kFetchers <=
              65536 / kThreads / 8 * 8 * kThreads);

// Rows of y that a unit makes.
template <bool kGated>
constexpr int kOutRows = kGated ? kWideRows / 2 : kWideRows;

struct WideWork {
  int units = 0, row_blocks = 0;
};

// Row tile of W, or of `up`. Of a warpgroup's eight tiles the second four are of `up`.
template <bool kGated>
__device__ int WideRowTile(int row_block, int tile) {
  return kGated ? row_block * 8 + tile / 8 * 4 + tile % 4 : row_block * kRowTiles + tile;
}

// A warpgroup: fills the ring.
template <bool kGated>
__device__ void FetchStages(const ExpertGemmArgs& args, const WideWork& work, std::byte* shared,
                            uint64_t* full, uint64_t* empty) {
  constexpr int kQuantCopies = kRowTiles * kQuantBytes / 16 / kFetchers;
  constexpr int kTileThreads = kQuantBytes / 16;  // Each copies 16 bytes of a row tile.
  constexpr int kTilesAtOnce = kFetchers / kTileThreads;
  constexpr int kRowCopies = kWideSlots / 16;  // Eight threads to 128 bytes of a slot
  const int thread = threadIdx.x % kFetchers;
  const int groups = static_cast<int>(Int4Groups(args.cols));
  const int64_t quant_bytes = Int4QuantBytes(args.rows, args.cols);
  int issued = 0;
  // The stage before the last has landed once only the last is pending.
  const auto publish = [&](int stage) {
    FenceAsyncProxy();
    Arrive(&full[stage % kStages]);
  };
  for (int unit = blockIdx.x; unit < work.units; unit += gridDim.x) {
    const ExpertTile tile = args.tiles[unit / work.row_blocks];
    const int row_block = unit % work.row_blocks;
    const int64_t expert = tile.expert * args.expert_stride_bytes;
    const std::byte* rows[kRowCopies];
#pragma unroll
    for (int j = 0; j < kRowCopies; ++j) {
      const int slot = j * 16 + thread / 8;
      rows[j] = nullptr;
      if (slot < tile.num_slots) {
        const int at = tile.first_slot + slot;
        const int64_t row = args.x_by_token ? args.slot_pairs[at] / args.experts_per_token : at;
        rows[j] = static_cast<const std::byte*>(args.x) + row * args.x_stride * 2 + thread % 8 * 16;
      }
    }
    const std::byte* quants[kQuantCopies];
#pragma unroll
    for (int j = 0; j < kQuantCopies; ++j) {
      const int m = j * kTilesAtOnce + thread / kTileThreads;
      quants[j] = (kGated && m % 8 >= 4 ? args.up : args.w) + expert +
                  int64_t{WideRowTile<kGated>(row_block, m)} * groups * kQuantBytes +
                  thread % kTileThreads * 16;
    }
    const int scale_tile = thread / 2;  // Two threads to the scales of a row tile
    const std::byte* scales = nullptr;
    if (scale_tile < kRowTiles) {
      scales = (kGated && scale_tile % 8 >= 4 ? args.up : args.w) + expert + quant_bytes +
               int64_t{WideRowTile<kGated>(row_block, scale_tile)} * groups * kScaleBytes +
               thread % 2 * 16;
    }
    for (int g = 0; g < groups; ++g, ++issued) {
      const int stage = issued % kStages;
      if (issued >= kStages) WaitBarrier(&empty[stage], (issued / kStages & 1) ^ 1);
      const uint32_t to = SharedAddress(shared + stage * kStageBytes);
#pragma unroll
      for (int j = 0; j < kQuantCopies; ++j) {
        CopyAsync16(to + kWeightsAt + (j * kFetchers + thread) * 16, quants[j] + g * kQuantBytes);
      }
      if (scales != nullptr) CopyAsync16(to + kScalesAt + thread * 16, scales + g * kScaleBytes);
      const uint32_t to_row = to + thread / 8 * 128 + (thread % 8 ^ thread / 8 % 8) * 16;
#pragma unroll
      for (int j = 0; j < kRowCopies; ++j) {
        if (rows[j] == nullptr) continue;
        CopyAsync16(to_row + j * 2048, rows[j] + g * 256);
        CopyAsync16(to_row + j * 2048 + kPanelBytes, rows[j] + g * 256 + 128);
      }
      CommitCopies();
      WaitCopies<1>();
      if (issued > 0) publish(issued - 1);
    }
  }
  WaitCopies<0>();
  if (issued > 0) publish(issued - 1);
}

// A warpgroup's share of a stage: two products of 64 rows by kRegs / 2 * 4 slots.
template <int kRegs>
__device__ void MultiplyGroup(const std::byte* stage, int warp, int lane, float (&scale)[2][2],
                              float (&sums)[2][kWideSlots / 2]) {
  // The sums are in units of the last group's scale, so that no second set is needed. A group that
  // is 2^60 times smaller than the one before adds nothing that float32 could hold: it counts as
  // zero, and no quotient overflows.
  constexpr float kNothing = 1.0f / (uint64_t{1} << 60);
  constexpr uint32_t kZeros = kInt4Bias * 0x11111111u;
  uint32_t keep[2] = {};
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const int tile = warp / 4 * 8 + m * 4 + warp % 4;
    const uint32_t word =
        *reinterpret_cast<const uint32_t*>(stage + kScalesAt + tile * kScaleBytes + lane / 4 * 4);
    const float now[2] = {LowBf16(word), HighBf16(word)};
    float ratio[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool counts = fabsf(now[i]) > fabsf(scale[m][i]) * kNothing;
      ratio[i] = counts ? __fdividef(scale[m][i], now[i]) : 1.0f;
      scale[m][i] = counts ? now[i] : scale[m][i];
      if (counts) keep[m] |= i == 0 ? 0x0f0f0f0fu : 0xf0f0f0f0u;  // Row g, or g + 8
    }
#pragma unroll
    for (int i = 0; i < kRegs; ++i) sums[m][i] *= ratio[i / 2 % 2];
  }
  const uint32_t values = SharedAddress(stage);
  uint32_t words[2][2][4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const int tile = warp / 4 * 8 + m * 4 + warp % 4;
      const uint4 bits = *reinterpret_cast<const uint4*>(stage + kWeightsAt + tile * kQuantBytes +
                                                         half * (kQuantBytes / 2) + lane * 16);
      words[half][m][0] = bits.x, words[half][m][1] = bits.y;
      words[half][m][2] = bits.z, words[half][m][3] = bits.w;
    }
  }
  uint32_t a[2][2][4];
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    const int half = step / 4, i = step % 4;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      UnpackInt4((words[half][m][i] & keep[m]) | (kZeros & ~keep[m]), a[step % 2][m]);
    }
    FenceMmaGroup();
    const uint64_t b = SwizzledOperand(values + half * kPanelBytes + i * 32);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      MmaGroup(reinterpret_cast<float(&)[kRegs]>(sums[m]), a[step % 2][m], b);
    }
    CommitMmaGroup();
    WaitMmaGroups<1>();  // The registers of the step before are free.
  }
  WaitMmaGroups<0>();
}

template <int kRegs>
__device__ void MultiplyUnit(int groups, const std::byte* shared, uint64_t* full, uint64_t* empty,
                             int warp, int lane, int& step, float (&scale)[2][2],
                             float (&sums)[2][kWideSlots / 2]) {
  for (int g = 0; g < groups; ++g, ++step) {
    const int stage = step % kStages;
    WaitBarrier(&full[stage], step / kStages & 1);
    MultiplyGroup<kRegs>(shared + stage * kStageBytes, warp, lane, scale, sums);
    __syncwarp();
    if (lane == 0) Arrive(&empty[stage]);
  }
}

__device__ uint32_t PackBf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ uint32_t LoadPair(const __nv_bfloat16* at) {
  return *reinterpret_cast<const uint32_t*>(at);
}

// Four matrices of 8 slots by 8 rows, of which a lane holds two slots of one row each; lane 8i + j
// names the place of row j of the i-th.
__device__ void StoreMatrices(__nv_bfloat16* at, const uint32_t (&bits)[4]) {
#if WRITESCOPE_WGMMA
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   SharedAddress(at)),
               "r"(bits[0]), "r"(bits[1]), "r"(bits[2]), "r"(bits[3])
               : "memory");
#endif
}

__device__ void SyncMultipliers() {
  asm volatile("bar.sync 1, %0;" ::"n"(kMultipliers) : "memory");
}

// Two warpgroups: multiply, and write y by way of shared memory, so that its rows are written as
// whole lines.
template <bool kGated>
__device__ void MultiplyUnits(const ExpertGemmArgs& args, const WideWork& work, std::byte* shared,
                              uint64_t* full, uint64_t* empty) {
  // Not known to be the same in a warp, the branches below would serialise the products.
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const int lane = threadIdx.x % 32;
  const int groups = static_cast<int>(Int4Groups(args.cols));
  auto* out = reinterpret_cast<__nv_bfloat16*>(shared + kOutAt);
  int step = 0;
  for (int unit = blockIdx.x; unit < work.units; unit += gridDim.x) {
    const ExpertTile tile = args.tiles[unit / work.row_blocks];
    float sums[2][kWideSlots / 2] = {};
    float scale[2][2] = {};
    switch (__shfl_sync(0xffffffffu, (tile.num_slots + 31) / 32, 0)) {
      case 1:
        MultiplyUnit<16>(groups, shared, full, empty, warp, lane, step, scale, sums);
        break;
      case 2:
        MultiplyUnit<32>(groups, shared, full, empty, warp, lane, step, scale, sums);
        break;
      case 3:
        MultiplyUnit<48>(groups, shared, full, empty, warp, lane, step, scale, sums);
        break;
      default:
        MultiplyUnit<64>(groups, shared, full, empty, warp, lane, step, scale, sums);
    }
    SyncMultipliers();  // The unit before has been written.
#pragma unroll
    for (int n = 0; n < kWideSlots / 8; n += 2) {
      if (n * 8 >= tile.num_slots) break;
      // Of two tiles of eight slots, rows g and rows g + 8 of each
      uint32_t first[4], second[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = n * 4 + j * 2, c = j % 2;
        const float a[2] = {sums[0][i] * scale[0][c], sums[0][i + 1] * scale[0][c]};
        const float b[2] = {sums[1][i] * scale[1][c], sums[1][i + 1] * scale[1][c]};
        first[j] = kGated ? PackBf16(SiLu(a[0]) * b[0], SiLu(a[1]) * b[1]) : PackBf16(a[0], a[1]);
        if constexpr (!kGated) second[j] = PackBf16(b[0], b[1]);
      }
      const int slot = (n + lane / 16) * 8 + lane % 8;
      const int row =
          warp / 4 * (kOutRows<kGated> / 2) + warp % 4 * kInt4TileRows + lane / 8 % 2 * 8;
      StoreMatrices(out + slot * kOutStride + row, first);
      if constexpr (!kGated) StoreMatrices(out + slot * kOutStride + row + 64, second);
    }
    SyncMultipliers();
    constexpr int kPieces = kOutRows<kGated> / 8;
    const int first_row = unit % work.row_blocks * kOutRows<kGated>;
    for (int i = threadIdx.x; i < tile.num_slots * kPieces; i += kMultipliers) {
      const int slot = i / kPieces, r = i % kPieces * 8;
      const int at = tile.first_slot + slot;
      const int64_t row = args.y_by_pair ? args.slot_pairs[at] : at;
      const __nv_bfloat16* from = out + slot * kOutStride;
      uint4 bits = *reinterpret_cast<const uint4*>(from + r);
      if (args.y_dealt) {
        // What lies together once dealt: pairs, eight columns apart
        from += r / 32 * 32 + r % 32 / 16 * 4 + r % 16 / 8 * 2;
        bits = make_uint4(LoadPair(from), LoadPair(from + 8), LoadPair(from + 16),
                          LoadPair(from + 24));
      }
      *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(args.y) + row * args.y_stride +
                                first_row + r) = bits;
    }
  }
}

template <bool kGated>
__global__ void __launch_bounds__(kThreads, 1)
    ExpertGemmWideKernel(const __grid_constant__ ExpertGemmArgs args) {
  extern __shared__ __align__(1024) std::byte shared[];
  auto* full = reinterpret_cast<uint64_t*>(shared + kBarriersAt);
  uint64_t* empty = full + kStages;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      InitBarrier(&full[i], kFetchers);
      InitBarrier(&empty[i], kMultipliers / 32);
    }
  }
  WaitForKernelBefore();
  LetNextKernelBegin();
  // Tiles that have slots come first.
  int tiles = 0;
  for (int first = 0; first < args.num_tiles; first += kThreads) {
    const int at = first + threadIdx.x;
    tiles += __syncthreads_count(at < args.num_tiles && args.tiles[at].num_slots > 0);
  }
  WideWork work;
  work.row_blocks = args.rows / kOutRows<kGated>;
  work.units = tiles * work.row_blocks;
  if (threadIdx.x >= kMultipliers) {
    ShrinkRegisters<kFetcherRegisters>();
    FetchStages<kGated>(args, work, shared, full, empty);
  } else {
    GrowRegisters<kMultiplierRegisters>();
    MultiplyUnits<kGated>(args, work, shared, full, empty);
  }
}

// A thread takes eight columns, which go to four places.
__global__ void DealColumnsKernel(const uint4* x, int64_t count, uint32_t* to) {
  WaitForKernelBefore();
  LetNextKernelBegin();
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i >= count) return;
  const uint4 bits = x[i];
  const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int j = 0; j < 4; ++j) to[DealtColumn(i * 8 + 2 * j) / 2] = words[j];
}

}  // namespace

bool WideIsBuilt() { return WRITESCOPE_WITH_WARPGROUPS; }

cudaError_t LaunchExpertGemmWide(cudaStream_t stream, const ExpertGemmArgs& args) {
  if (!args.x_dealt || args.x_stride % 8 != 0 || args.y_stride % 8 != 0 || !IsAligned16(args.x) ||
      !IsAligned16(args.y)) {
    return cudaErrorInvalidValue;
  }
  const auto kernel =
      args.up != nullptr ? &ExpertGemmWideKernel<true> : &ExpertGemmWideKernel<false>;
  static const cudaError_t allowed = [] {
    for (const auto any : {&ExpertGemmWideKernel<true>, &ExpertGemmWideKernel<false>}) {
      const cudaError_t error =
          cudaFuncSetAttribute(any, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
      if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
  }();
  if (allowed != cudaSuccess) return allowed;
  return LaunchEarly(stream, kernel, NumProcessors(), kThreads, kSharedBytes, args);
}

cudaError_t LaunchDealColumns(cudaStream_t stream, const void* x, int64_t rows, int64_t cols,
                              void* to) {
  constexpr int kDealers = 256;
  const int64_t count = rows * cols / 8;
  return LaunchEarly(stream, &DealColumnsKernel,
                     static_cast<unsigned>((count + kDealers - 1) / kDealers), kDealers, 0,
                     static_cast<const uint4*>(x), count, static_cast<uint32_t*>(to));
}

}  // namespace writescope::kernels
