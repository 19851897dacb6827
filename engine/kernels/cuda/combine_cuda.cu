// The experts' results, weighed and added to the residual stream; and the norm that comes next, for
// which a block takes a whole token and keeps it in registers.
#include "engine/kernels/cuda/elementwise_cuda.h"
#include "engine/kernels/cuda/launch.h"
#include "engine/kernels/cuda/router_cuda.h"
#include "engine/kernels/cuda/values.h"

namespace writescope::kernels {
namespace {

constexpr int kThreads = 256;  // As of the norm alone: its sums are taken in the same order.
constexpr int kWidth = 8;      // Values of a thread at a time
constexpr int kMaxChunks = 4;  // Of a row, kThreads * kWidth values each

// Eight neighbouring values of a token: what is there before, and the results added to it.
template <typename T>
struct Part {
  float before[kWidth];

  __device__ void Load(const CombineCuda& args, int64_t token, int d) {
    Load8(static_cast<const T*>(args.out) + token * args.hidden + d, before);
  }
  __device__ void AddResults(const CombineCuda& args, int64_t token, int d,
                             float (&sum)[kWidth]) const {
    const T* from = static_cast<const T*>(args.results) + token * args.k * args.hidden + d;
#pragma unroll
    for (float& value : sum) value = 0;
#pragma unroll 8
    for (int i = 0; i < args.k; ++i) {
      const float weight = args.weights[token * args.k + i];
      float values[kWidth];
      Load8(from + int64_t{i} * args.hidden, values);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sum[j] += weight * values[j];
    }
#pragma unroll
    for (int j = 0; j < kWidth; ++j) sum[j] += before[j];
  }
};

template <typename T, bool kVector>
__global__ void CombineKernel(CombineCuda args) {
  LetNextKernelBegin();
  WaitForKernelBefore();
  const int64_t token = blockIdx.x;
  const int d = (blockIdx.y * kThreads + threadIdx.x) * (kVector ? kWidth : 1);
  if (d >= args.hidden) return;
  T* to = static_cast<T*>(args.out) + token * args.hidden + d;
  if constexpr (kVector) {
    float sum[kWidth];
    Part<T> part;
    part.Load(args, token, d);
    part.AddResults(args, token, d, sum);
    Store8(sum, to);
  } else {
    const T* from = static_cast<const T*>(args.results) + token * args.k * args.hidden + d;
    float sum = 0;
    for (int i = 0; i < args.k; ++i) {
      sum += args.weights[token * args.k + i] * ToFloat(from[int64_t{i} * args.hidden]);
    }
    *to = FromFloat<T>(ToFloat(*to) + sum);
  }
}

template <typename T, int kChunks>
__global__ void __launch_bounds__(kThreads) CombineNormKernel(CombineCuda args) {
  __shared__ float warp_sums[kThreads / 32];
  const int64_t token = blockIdx.x;
  const auto dim = [](int chunk) { return (chunk * kThreads + threadIdx.x) * kWidth; };
  // Where registers suffice the norm's weights come before the results, too.
  constexpr bool kEarly = kChunks <= 2;
  float weights[kEarly ? kChunks : 1][kWidth];
  if constexpr (kEarly) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (dim(c) < args.hidden) Load8(args.norm + dim(c), weights[c]);
    }
  }
  LetNextKernelBegin();
  WaitForKernelBefore();
  float row[kChunks][kWidth];
  float sum = 0;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    if (dim(c) >= args.hidden) continue;
    Part<T> part;
    part.Load(args, token, dim(c));
    part.AddResults(args, token, dim(c), row[c]);
    T* to = static_cast<T*>(args.out) + token * args.hidden + dim(c);
    Store8(row[c], to);
    // The norm is of what was stored.
#pragma unroll
    for (float& value : row[c]) {
      value = ToFloat(FromFloat<T>(value));
      sum += value * value;
    }
  }
  sum = BlockSum(sum, warp_sums);
  const float factor = 1.0f / sqrtf(sum / static_cast<float>(args.hidden) + args.norm_eps);
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    if (dim(c) >= args.hidden) continue;
    float late[kWidth];
    if constexpr (!kEarly) Load8(args.norm + dim(c), late);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      row[c][j] = row[c][j] * factor * (kEarly ? weights[kEarly ? c : 0][j] : late[j]);
    }
    Store8(row[c], static_cast<T*>(args.normed) + token * args.hidden + dim(c));
  }
}

template <typename T>
cudaError_t Combine(cudaStream_t stream, const CombineCuda& args) {
  const bool vector =
      args.hidden % kWidth == 0 && IsAligned16(args.results) && IsAligned16(args.out);
  constexpr int kChunkValues = kThreads * kWidth;
  const int chunks = (args.hidden + kChunkValues - 1) / kChunkValues;
  if (args.norm != nullptr && vector && chunks <= kMaxChunks && IsAligned16(args.norm) &&
      IsAligned16(args.normed)) {
    const auto kernel = chunks == 1   ? &CombineNormKernel<T, 1>
                        : chunks == 2 ? &CombineNormKernel<T, 2>
                                      : &CombineNormKernel<T, kMaxChunks>;
    return LaunchEarly(stream, kernel, args.num_tokens, kThreads, 0, args);
  }
  const int per_block = kThreads * (vector ? kWidth : 1);
  const dim3 grid(args.num_tokens, (args.hidden + per_block - 1) / per_block);
  const auto kernel = vector ? &CombineKernel<T, true> : &CombineKernel<T, false>;
  const cudaError_t error = LaunchEarly(stream, kernel, grid, kThreads, 0, args);
  if (error != cudaSuccess || args.norm == nullptr) return error;
  return LaunchRmsNorm(stream, args.type, args.num_tokens, args.hidden, args.out, args.norm,
                       args.norm_eps, args.normed);
}

}  // namespace

cudaError_t LaunchCombine(cudaStream_t stream, const CombineCuda& args) {
  if (args.num_tokens == 0) return cudaSuccess;
  return args.type == ValueType::kF32 ? Combine<float>(stream, args)
                                      : Combine<__nv_bfloat16>(stream, args);
}

}  // namespace writescope::kernels
