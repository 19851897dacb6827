#include <climits>

#include "engine/kernels/cuda/cluster.h"
#include "engine/kernels/cuda/elementwise_cuda.h"
#include "engine/kernels/cuda/launch.h"
#include "engine/kernels/cuda/values.h"

namespace writescope::kernels {
namespace {

constexpr int kThreads = 256;

// Blocks for `count` items, a thread each; beyond the cap a thread takes several.
int BlocksFor(int64_t count) {
  constexpr int64_t kMaxBlocks = 4096;
  const int64_t blocks = (count + kThreads - 1) / kThreads;
  return static_cast<int>(blocks < kMaxBlocks ? blocks : kMaxBlocks);
}

__device__ int64_t FirstItem() { return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; }
__device__ int64_t ItemStride() { return static_cast<int64_t>(gridDim.x) * kThreads; }

template <typename Word>
__global__ void GatherRowsKernel(int64_t row_words, int64_t from_stride_words, const int32_t* rows,
                                 const Word* from, Word* to) {
  const Word* source = from + rows[blockIdx.x] * from_stride_words;
  Word* target = to + blockIdx.x * row_words;
  for (int64_t i = threadIdx.x; i < row_words; i += kThreads) target[i] = source[i];
}

// A block takes a row. kVector: rows and pointers are multiples of 16 bytes and of 8 values.
template <typename T, bool kVector>
__global__ void RmsNormKernel(int dim, const T* x, const float* weight, float eps, T* out) {
  constexpr int kWidth = kVector ? 8 : 1;
  __shared__ float warp_sums[kThreads / 32];
  WaitForKernelBefore();
  LetNextKernelBegin();
  x += static_cast<int64_t>(blockIdx.x) * dim;
  out += static_cast<int64_t>(blockIdx.x) * dim;
  float sum = 0;
  for (int d = threadIdx.x * kWidth; d < dim; d += kThreads * kWidth) {
    if constexpr (kVector) {
      float values[8];
      Load8(x + d, values);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum += values[i] * values[i];
    } else {
      const float value = ToFloat(x[d]);
      sum += value * value;
    }
  }
  sum = BlockSum(sum, warp_sums);
  const float factor = 1.0f / sqrtf(sum / static_cast<float>(dim) + eps);
  for (int d = threadIdx.x * kWidth; d < dim; d += kThreads * kWidth) {
    if constexpr (kVector) {
      float values[8], weights[8];
      Load8(x + d, values);
      Load8(weight + d, weights);
#pragma unroll
      for (int i = 0; i < 8; ++i) values[i] = values[i] * factor * weights[i];
      Store8(values, out + d);
    } else {
      out[d] = FromFloat<T>(ToFloat(x[d]) * factor * weight[d]);
    }
  }
}

template <typename T>
cudaError_t RmsNorm(cudaStream_t stream, int num_rows, int dim, const void* x, const float* weight,
                    float eps, void* out) {
  const bool vector = dim % 8 == 0 && IsAligned16(x) && IsAligned16(weight) && IsAligned16(out);
  const auto kernel = vector ? &RmsNormKernel<T, true> : &RmsNormKernel<T, false>;
  return LaunchEarly(stream, kernel, num_rows, kThreads, 0, dim, static_cast<const T*>(x), weight,
                     eps, static_cast<T*>(out));
}

template <typename T, bool kVector>
__global__ void SwiGluKernel(int64_t count, const T* gate, const T* up, T* out) {
  WaitForKernelBefore();
  LetNextKernelBegin();
  for (int64_t item = FirstItem(); item < count; item += ItemStride()) {
    if constexpr (kVector) {
      float gates[8], ups[8];
      Load8(gate + item * 8, gates);
      Load8(up + item * 8, ups);
#pragma unroll
      for (int i = 0; i < 8; ++i) gates[i] = SiLu(gates[i]) * ups[i];
      Store8(gates, out + item * 8);
    } else {
      out[item] = FromFloat<T>(SiLu(ToFloat(gate[item])) * ToFloat(up[item]));
    }
  }
}

template <typename T>
cudaError_t SwiGlu(cudaStream_t stream, int64_t count, const void* gate, const void* up,
                   void* out) {
  const bool vector = count % 8 == 0 && IsAligned16(gate) && IsAligned16(up) && IsAligned16(out);
  const int64_t items = vector ? count / 8 : count;
  const auto kernel = vector ? &SwiGluKernel<T, true> : &SwiGluKernel<T, false>;
  return LaunchEarly(stream, kernel, BlocksFor(items), kThreads, 0, items,
                     static_cast<const T*>(gate), static_cast<const T*>(up), static_cast<T*>(out));
}

// Orders finite values and infinities as numbers; 0 and -0 are equal.
__device__ uint32_t OrderOf(float value) {
  const uint32_t bits = __float_as_uint(value + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ float ValueOf(uint32_t order) {
  return __uint_as_float(order & 0x80000000u ? order & 0x7fffffffu : ~order);
}

// The largest seen so far: of equal values the lowest index has the largest key.
struct Largest {
  uint64_t key = 0;
  int first_nan = INT_MAX;

  __device__ void Take(float value, int index) {
    if (isnan(value)) {
      first_nan = min(first_nan, index);
    } else {
      const uint64_t own = uint64_t{OrderOf(value)} << 32 | (UINT32_MAX - index);
      key = own > key ? own : key;
    }
  }
  __device__ void Take(const Largest& other) {
    key = other.key > key ? other.key : key;
    first_nan = min(first_nan, other.first_nan);
  }
  __device__ void TakeOfWarp() {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      Largest other;
      other.key = __shfl_xor_sync(0xffffffffu, key, offset);
      other.first_nan = __shfl_xor_sync(0xffffffffu, first_nan, offset);
      Take(other);
    }
  }
};

constexpr int kMaxThreads = 1024;
constexpr int kMaxParts = 8;  // Of a row, where a cluster takes it

// A block takes a row, or the blocks of a cluster take a part of one each. kVector: rows are
// multiples of 16 bytes and of 8 values.
template <typename T, bool kVector, bool kCluster>
__global__ void __launch_bounds__(kMaxThreads) MaxOfRowsKernel(int dim, const T* x, RowMax* to) {
  constexpr int kParts = kCluster ? kMaxParts : 1;
  constexpr int kStep = kParts * kMaxThreads;
  __shared__ Largest of_warps[kMaxThreads / 32];
  __shared__ Largest of_parts[kParts];  // In the first block
  if constexpr (kCluster) ArriveAtCluster();
  WaitForKernelBefore();
  LetNextKernelBegin();
  const int row = static_cast<int>(blockIdx.x) / kParts,
            part = static_cast<int>(blockIdx.x) % kParts;
  const int first = part * kMaxThreads + static_cast<int>(threadIdx.x);
  x += int64_t{row} * dim;
  Largest largest;
  if constexpr (kVector) {
#pragma unroll 4
    for (int d = first * 8; d < dim; d += kStep * 8) {
      float values[8];
      Load8(x + d, values);
#pragma unroll
      for (int i = 0; i < 8; ++i) largest.Take(values[i], d + i);
    }
  } else {
    for (int d = first; d < dim; d += kStep) largest.Take(ToFloat(x[d]), d);
  }
  largest.TakeOfWarp();
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = largest;
  __syncthreads();
  if (threadIdx.x < 32) {
    largest = of_warps[threadIdx.x];
    largest.TakeOfWarp();
  }
  if constexpr (kCluster) {
    WaitForCluster();  // All blocks have begun.
    if (threadIdx.x == 0) *InFirstOfCluster(&of_parts[part]) = largest;
    __syncwarp();
    ArriveAtCluster();
    if (part != 0) return;
    WaitForCluster();
    if (threadIdx.x < 32) {
      largest = of_parts[threadIdx.x % kParts];
      largest.TakeOfWarp();
    }
  }
  if (threadIdx.x != 0) return;
  RowMax result;
  const bool is_any = largest.key != 0;  // Something that is no NaN
  result.value = is_any ? ValueOf(static_cast<uint32_t>(largest.key >> 32)) : -INFINITY;
  result.index = is_any ? static_cast<int>(UINT32_MAX - static_cast<uint32_t>(largest.key)) : 0;
  // Nothing larger than -infinity is as if there were nothing.
  if (result.value == -INFINITY) result.index = 0;
  result.first_nan = largest.first_nan == INT_MAX ? -1 : largest.first_nan;
  to[row] = result;
}

template <typename T>
cudaError_t MaxOfRows(cudaStream_t stream, int num_rows, int dim, const void* x, RowMax* to) {
  const bool vector = dim % 8 == 0 && IsAligned16(x);
  const int parts = HasSm90() ? kMaxParts : 1;
  const auto kernel =
      parts > 1 ? (vector ? &MaxOfRowsKernel<T, true, true> : &MaxOfRowsKernel<T, false, true>)
                : (vector ? &MaxOfRowsKernel<T, true, false> : &MaxOfRowsKernel<T, false, false>);
  return LaunchEarlyInClusters(stream, kernel, num_rows * parts, parts, kMaxThreads, 0, dim,
                               static_cast<const T*>(x), to);
}

template <typename T>
__global__ void ToFloatsKernel(int64_t count, const T* from, float* to) {
  for (int64_t i = FirstItem(); i < count; i += ItemStride()) to[i] = ToFloat(from[i]);
}

__device__ uint64_t GlobalNs() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
}

// Eight values a thread: the link carries few large writes faster than many small ones.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    PublishKernel(const __grid_constant__ PublishCall call) {
  WaitForKernelBefore();
  const bool is_first = FirstItem() == 0;
  if (is_first && call.began_ns != nullptr) *call.began_ns = GlobalNs();
  T* const to = static_cast<T*>(call.to);
  if (*call.failed == 0) {
    const int64_t whole = call.count / 8;
    for (int64_t i = FirstItem(); i < whole; i += ItemStride()) {
      float values[8];
      Load8(call.from + 8 * i, values);
      Store8(values, to + 8 * i);
    }
    if (is_first) {
      for (int64_t i = 8 * whole; i < call.count; ++i) to[i] = FromFloat<T>(call.from[i]);
    }
  }
  // A fence orders what its thread has seen of others, too: the block's stores before its count,
  // and all counts before the flag.
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence_system();
  if (atomicAdd(call.counter, 1) + 1 < gridDim.x) return;
  *call.counter = 0;
  __threadfence_system();
  if (call.ended_ns != nullptr) *call.ended_ns = GlobalNs();
  asm volatile("st.release.sys.u64 [%0], %1;" ::"l"(call.ready), "l"(call.value) : "memory");
}

}  // namespace

cudaError_t LaunchGatherRows(cudaStream_t stream, int num_rows, int64_t row_bytes,
                             int64_t from_stride_bytes, const int32_t* rows, const void* from,
                             void* to) {
  if (num_rows == 0) return cudaSuccess;
  if (row_bytes % 16 == 0 && from_stride_bytes % 16 == 0 && IsAligned16(from) && IsAligned16(to)) {
    GatherRowsKernel<<<num_rows, kThreads, 0, stream>>>(row_bytes / 16, from_stride_bytes / 16,
                                                        rows, static_cast<const uint4*>(from),
                                                        static_cast<uint4*>(to));
  } else {
    GatherRowsKernel<<<num_rows, kThreads, 0, stream>>>(row_bytes / 2, from_stride_bytes / 2, rows,
                                                        static_cast<const uint16_t*>(from),
                                                        static_cast<uint16_t*>(to));
  }
  return cudaGetLastError();
}

cudaError_t LaunchRmsNorm(cudaStream_t stream, ValueType type, int num_rows, int dim, const void* x,
                          const float* weight, float eps, void* out) {
  if (num_rows == 0) return cudaSuccess;
  return type == ValueType::kF32
             ? RmsNorm<float>(stream, num_rows, dim, x, weight, eps, out)
             : RmsNorm<__nv_bfloat16>(stream, num_rows, dim, x, weight, eps, out);
}

cudaError_t LaunchSwiGlu(cudaStream_t stream, ValueType type, int64_t count, const void* gate,
                         const void* up, void* out) {
  if (count == 0) return cudaSuccess;
  return type == ValueType::kF32 ? SwiGlu<float>(stream, count, gate, up, out)
                                 : SwiGlu<__nv_bfloat16>(stream, count, gate, up, out);
}

cudaError_t LaunchMaxOfRows(cudaStream_t stream, ValueType type, int num_rows, int dim,
                            const void* x, RowMax* to) {
  if (num_rows == 0) return cudaSuccess;
  return type == ValueType::kF32 ? MaxOfRows<float>(stream, num_rows, dim, x, to)
                                 : MaxOfRows<__nv_bfloat16>(stream, num_rows, dim, x, to);
}

cudaError_t LaunchToFloats(cudaStream_t stream, ValueType type, int64_t count, const void* from,
                           float* to) {
  if (count == 0) return cudaSuccess;
  if (type == ValueType::kF32) {
    ToFloatsKernel<<<BlocksFor(count), kThreads, 0, stream>>>(count,
                                                              static_cast<const float*>(from), to);
  } else {
    ToFloatsKernel<<<BlocksFor(count), kThreads, 0, stream>>>(
        count, static_cast<const __nv_bfloat16*>(from), to);
  }
  return cudaGetLastError();
}

cudaError_t LaunchPublish(cudaStream_t stream, const PublishCall& call) {
  if (!IsAligned16(call.from) || !IsAligned16(call.to)) return cudaErrorMisalignedAddress;
  const auto kernel =
      call.type == ValueType::kF32 ? &PublishKernel<float> : &PublishKernel<__nv_bfloat16>;
  const int blocks = std::max(1, BlocksFor(call.count / 8));
  return LaunchEarly(stream, kernel, dim3(blocks), kThreads, 0, call);
}

}  // namespace writescope::kernels
