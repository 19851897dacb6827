// A product of few rows with a large matrix, on sm_90: each multiprocessor takes an equal run of
// the matrix's rows, which bulk copies bring into a ring in shared memory. They begin while the
// kernel before is still at work on x, and as many bytes are on their way as there is room for. A
// value's sum is taken in the order of small_product.cu's, to the same bits.
#include <algorithm>

#include "engine/kernels/cuda/async_copy.h"
#include "engine/kernels/cuda/launch.h"
#include "engine/kernels/cuda/small_product.h"
#include "engine/kernels/cuda/small_product_device.h"
#include "engine/kernels/cuda/tensor_core.h"
#include "engine/kernels/cuda/values.h"

namespace writescope::kernels {
namespace {

constexpr int kWarps = 16;  // They divide the columns of a stage.
constexpr int kThreads = (kWarps + 1) * 32;
constexpr int kWarpCols = 64;
constexpr int kStageRows = 16, kStageCols = kWarps * kWarpCols;
// 64 bytes more than what it holds: rows that a warp reads at once begin at other banks.
constexpr int kRowBytes = kStageCols * 2 + 64;
constexpr int kStageBytes = kStageRows * kRowBytes;
constexpr int kSumStride = kStageRows + 4;

constexpr int kMaxRows = 8;    // Of x
constexpr int kKeptSteps = 4;  // Of x, a stage's columns each, in registers
constexpr int kMaxStages = 6;
// Fills on their way at a time: enough for all that memory gives. What is asked for beyond that is
// in the way of the few reads of the kernels before, which this one's fetching runs beside.
constexpr int kFillsAhead = 2;
constexpr int kSumFloats = kWarps * kMaxRows * kSumStride;
constexpr int kBarriersAt = 2 * kSumFloats * 4;  // Behind the sums: two, in turns
constexpr int kStagesAt = kBarriersAt + 128;
static_assert(2 * kMaxStages * 8 <= 128);
constexpr int SharedBytes(int stages) { return kStagesAt + stages * kStageBytes; }
static_assert(SharedBytes(kMaxStages) <= 227 * 1024);

struct Rows {
  int first, end;  // Of this block
};

// How often a stage is filled for so many rows of W.
__host__ __device__ int NumFills(int rows, int cols) {
  return (rows + kStageRows - 1) / kStageRows * ((cols + kStageCols - 1) / kStageCols);
}

// The ring, and where in it one is.
struct Ring {
  std::byte* stages;
  uint64_t *full, *empty;
  int num_stages;
  int stage = 0;
  uint32_t parity = 0;
  __device__ std::byte* at() const { return stages + stage * kStageBytes; }
  __device__ void Next() {
    if (++stage == num_stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// One warp: brings tiles of rows, all columns of one before the next.
__device__ void FetchRows(const SmallProductArgs& args, const Rows& rows, Ring ring) {
  const int lane = threadIdx.x % 32;
  Ring landing = ring;  // The oldest fill that is on its way
  int ahead = 0;        // How many are
  ring.parity = 1;      // Of a ring that is empty
  const uint64_t policy = ReadOncePolicy();
  for (int row = rows.first; row < rows.end; row += kStageRows) {
    const int count = min(kStageRows, rows.end - row);
    const std::byte* from = args.w + (row + lane) * args.w_stride * 2;
    for (int col = 0; col < args.cols; col += kStageCols) {
      const int bytes = min(kStageCols, args.cols - col) * 2;
      if (ahead == kFillsAhead) {
        WaitBarrier(&landing.full[landing.stage], landing.parity);
        landing.Next();
      } else {
        ++ahead;
      }
      WaitBarrier(&ring.empty[ring.stage], ring.parity);
      if (lane == 0) ArriveExpecting(&ring.full[ring.stage], count * bytes);
      __syncwarp();
      if (lane < count) {
        CopyBulk(ring.at() + lane * kRowBytes, from + col * 2, bytes, &ring.full[ring.stage],
                 policy);
      }
      ring.Next();
    }
  }
}

// What a lane holds of x for its columns of a stage.
struct ValueStep {
  uint4 x[2];
};

__device__ void MultiplyRows(const SmallProductArgs& args, const Rows& rows, float* sums_at,
                             Ring ring) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int lane_col = warp * kWarpCols + lane % 4 * 8;
  const bool aligned = args.x_stride % 8 == 0 && reinterpret_cast<uintptr_t>(args.x) % 16 == 0;
  const auto load_values = [&](int col, ValueStep* to) {
    // Found anew for each load: where it was found once, the kernel took a fifth longer.
    const int row = lane / 4;
    const __nv_bfloat16* x = row < args.num_rows
                                 ? static_cast<const __nv_bfloat16*>(args.x) + row * args.x_stride
                                 : nullptr;
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      to->x[b] = LoadValues(x, col + 32 * b + lane_col, args.cols, aligned);
    }
  };
  const bool keeps = args.cols <= kKeptSteps * kStageCols;
  ValueStep kept[kKeptSteps];
#pragma unroll
  for (int i = 0; i < kKeptSteps; ++i) load_values(i * kStageCols, &kept[i]);
  // Fills that still come into a stage that is read now, and whoever fills waits for its readers.
  int refills = NumFills(rows.end - rows.first, args.cols) - ring.num_stages;
  int turn = 0;
  // Of a tile of rows, the one value that a thread writes in the end.
  static_assert(kMaxRows * kStageRows <= kWarps * 32);
  const int slot = threadIdx.x / kStageRows, r = threadIdx.x % kStageRows;
  for (int row = rows.first; row < rows.end; row += kStageRows, turn ^= 1) {
    const bool writes = slot < args.num_rows && row + r < rows.end;
    const int64_t to = slot * args.y_stride + row + r;
    const float before = writes ? ValueBefore(args, to) : 0;
    float sums[4] = {};
    const auto multiply = [&](int col, const ValueStep& values) {
      WaitBarrier(&ring.full[ring.stage], ring.parity);
      const std::byte* low = ring.at() + lane / 4 * kRowBytes + lane_col * 2;
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        // Past the end lies what was there before; rows past the end nobody reads.
        if (col + 32 * b + lane_col >= args.cols) low = nullptr;
        const uint4 zero = make_uint4(0, 0, 0, 0);
        const uint4 l = low != nullptr ? *reinterpret_cast<const uint4*>(low + 64 * b) : zero;
        const uint4 h =
            low != nullptr ? *reinterpret_cast<const uint4*>(low + 8 * kRowBytes + 64 * b) : zero;
        const uint32_t first[4] = {l.x, h.x, l.y, h.y};
        const uint32_t second[4] = {l.z, h.z, l.w, h.w};
        Mma(first, values.x[b].x, values.x[b].y, sums);
        Mma(second, values.x[b].z, values.x[b].w, sums);
      }
      // Every lane for itself: none has to have read for another to tell so.
      if (refills-- > 0) {
        FenceAsyncProxy();
        Arrive(&ring.empty[ring.stage]);
      }
      ring.Next();
    };
    if (keeps) {
#pragma unroll
      for (int i = 0; i < kKeptSteps; ++i) {
        if (i * kStageCols < args.cols) multiply(i * kStageCols, kept[i]);
      }
    } else {
      for (int col = 0; col < args.cols; col += kStageCols) {
        ValueStep values;
        load_values(col, &values);
        multiply(col, values);
      }
    }
    float* warp_sums = sums_at + turn * kSumFloats;
    const auto sum_at = [&](int w, int slot) {
      return warp_sums + (w * kMaxRows + slot) * kSumStride;
    };
#pragma unroll
    for (int c = 0; c < 4; ++c) sum_at(warp, lane % 4 * 2 + c % 2)[lane / 4 + c / 2 * 8] = sums[c];
    asm volatile("bar.sync 1, %0;" ::"n"(kWarps * 32) : "memory");
    if (writes) {
      float value = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) value += sum_at(w, slot)[r];
      StoreProduct(args, to, value, before);
    }
  }
}

__global__ void __launch_bounds__(kThreads, 1)
    SmallProductRingKernel(const __grid_constant__ SmallProductArgs args, int num_stages) {
  extern __shared__ __align__(128) std::byte shared[];
  auto* full = reinterpret_cast<uint64_t*>(shared + kBarriersAt);
  const Ring ring = {shared + kStagesAt, full, full + kMaxStages, num_stages};
  if (threadIdx.x == 0) {
    for (int i = 0; i < num_stages; ++i) {
      InitBarrier(&ring.full[i], 1);
      InitBarrier(&ring.empty[i], kWarps * 32);
    }
    PublishBarriers();
  }
  __syncthreads();
  const Rows rows = {static_cast<int>(int64_t{args.rows} * blockIdx.x / gridDim.x),
                     static_cast<int>(int64_t{args.rows} * (blockIdx.x + 1) / gridDim.x)};
  if (threadIdx.x / 32 == kWarps) {
    FetchRows(args, rows, ring);
  } else {
    WaitForKernelBefore();
    LetNextKernelBegin();
    MultiplyRows(args, rows, reinterpret_cast<float*>(shared), ring);
  }
}

bool Fits() {
  static const bool fits =
      MaxSharedBytes() >= SharedBytes(kMaxStages) &&
      cudaFuncSetAttribute(SmallProductRingKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           SharedBytes(kMaxStages)) == cudaSuccess;
  return fits;
}

}  // namespace

bool RunsSmallProductRing(const SmallProductArgs& args) {
  return HasSm90() && args.num_rows <= kMaxRows && args.batch == 1 && args.cols % 8 == 0 &&
         IsAligned16(args.w) && args.w_stride % 8 == 0 && Fits();
}

cudaError_t LaunchSmallProductRing(cudaStream_t stream, const SmallProductArgs& args) {
  // No more room than what a block brings: the kernel after this one may begin beside it.
  const int most_rows = (args.rows + NumProcessors() - 1) / NumProcessors();
  const int stages = std::min(kMaxStages, NumFills(most_rows, args.cols));
  return LaunchEarly(stream, &SmallProductRingKernel, NumProcessors(), kThreads,
                     SharedBytes(stages), args, stages);
}

}  // namespace writescope::kernels
