#include "engine/kernels/cuda/launch.h"
#include "engine/kernels/cuda/prepare_cuda.h"
#include "engine/kernels/cuda/values.h"

namespace writescope::kernels {
namespace {

// A warp takes one head of one token, or MLA's latent; its row lies in shared memory.
constexpr int kWarps = 4;

__device__ int Lane() { return threadIdx.x % 32; }
// The warp's index among the heads of a token.
__device__ int HeadRow() { return blockIdx.y * kWarps + threadIdx.x / 32; }

template <typename T>
__device__ void LoadRow(int dim, const T* from, float* row) {
  for (int d = Lane(); d < dim; d += 32) row[d] = ToFloat(from[d]);
  __syncwarp();
}

__device__ void NormRow(int dim, const float* weight, float eps, float* row) {
  float sum = 0;
  for (int d = Lane(); d < dim; d += 32) sum += row[d] * row[d];
  const float factor = 1.0f / sqrtf(WarpSum(sum) / static_cast<float>(dim) + eps);
  for (int d = Lane(); d < dim; d += 32) row[d] = row[d] * factor * weight[d];
  __syncwarp();
}

// The first angles of a lane, which do not depend on the kernel before.
struct Angles {
  static constexpr int kHeld = 2;
  float sine[kHeld], cosine[kHeld];

  __device__ static void Of(const RopeArgs& rope, int64_t position, int i, float* sine,
                            float* cosine) {
    sincosf(static_cast<float>(position) * rope.inv_freq[i], sine, cosine);
    *sine *= rope.cos_sin_scale;
    *cosine *= rope.cos_sin_scale;
  }
  __device__ Angles(const RopeArgs& rope, int64_t position) {
#pragma unroll
    for (int held = 0; held < kHeld; ++held) {
      const int i = Lane() + 32 * held;
      if (i < rope.dim / 2) Of(rope, position, i, &sine[held], &cosine[held]);
    }
  }
};

__device__ void RopeRow(const RopeArgs& rope, int64_t position, const Angles& angles, float* row) {
  const int half = rope.dim / 2;
  const auto rotate = [&](int i, float sine, float cosine) {
    const float first = row[i], second = row[i + half];
    row[i] = first * cosine - second * sine;
    row[i + half] = second * cosine + first * sine;
  };
#pragma unroll
  for (int held = 0; held < Angles::kHeld; ++held) {
    const int i = Lane() + 32 * held;
    if (i < half) rotate(i, angles.sine[held], angles.cosine[held]);
  }
  for (int i = Lane() + 32 * Angles::kHeld; i < half; i += 32) {
    float sine, cosine;
    Angles::Of(rope, position, i, &sine, &cosine);
    rotate(i, sine, cosine);
  }
  __syncwarp();
}

__device__ uint32_t Bf16Pair(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ void WriteKey(KvDtype dtype, int slot, int dim, int k_dim, const float* row,
                         std::byte* plane) {
  const auto value = [=](int d) { return d < dim ? row[d] : 0.0f; };
  if (dtype == KvDtype::kBf16) {
    uint32_t* words = reinterpret_cast<uint32_t*>(plane);
    for (int p = Lane(); p < k_dim / 2; p += 32) {
      words[KIndex(slot, 2 * p, k_dim, 2) / 2] = Bf16Pair(value(2 * p), value(2 * p + 1));
    }
  } else {
    float* words = reinterpret_cast<float*>(plane);
    for (int d = Lane(); d < k_dim; d += 32) words[KIndex(slot, d, k_dim, 1)] = value(d);
  }
}

__device__ void WriteValue(KvDtype dtype, int slot, int dim, int v_dim, const float* row,
                           std::byte* plane) {
  for (int d = Lane(); d < v_dim; d += 32) {
    const float value = d < dim ? row[d] : 0.0f;
    if (dtype == KvDtype::kBf16) {
      reinterpret_cast<__nv_bfloat16*>(plane)[VIndex(slot, d, v_dim, 2)] =
          __float2bfloat16_rn(value);
    } else {
      reinterpret_cast<float*>(plane)[VIndex(slot, d, v_dim, 1)] = value;
    }
  }
}

__device__ std::byte* BlockOf(const TokenPlace& place, int layer) {
  return place.block + layer * place.layer_stride_bytes;
}

// One head of one token: those of the queries, then of the keys, then of the values.
template <typename T>
__device__ void PrepareHead(const GqaPrepareCuda& args, int64_t token, int head,
                            const TokenPlace& place, const Angles& angles, float* row) {
  const int dim = args.head_dim, kv_heads = args.kv.num_kv_heads;
  std::byte* block = BlockOf(place, args.layer);
  if (head < args.num_heads) {
    const int64_t at = token * args.num_heads + head;
    LoadRow(dim, static_cast<const T*>(args.q) + token * args.q_stride + int64_t{head} * dim, row);
    if (args.q_norm != nullptr) NormRow(dim, args.q_norm, args.norm_eps, row);
    RopeRow(args.rope, place.position, angles, row);
    float* to = args.q_out + at * args.kv.k_dim;
    for (int d = Lane(); d < args.kv.k_dim; d += 32) to[d] = d < dim ? row[d] * args.scale_log2 : 0;
    return;
  }
  head -= args.num_heads;
  if (head < kv_heads) {
    LoadRow(dim, static_cast<const T*>(args.k) + token * args.kv_stride + int64_t{head} * dim, row);
    if (args.k_norm != nullptr) NormRow(dim, args.k_norm, args.norm_eps, row);
    RopeRow(args.rope, place.position, angles, row);
    WriteKey(args.kv.dtype, place.slot, dim, args.kv.k_dim, row,
             block + head * args.kv.head_bytes());
    return;
  }
  head -= kv_heads;
  LoadRow(dim, static_cast<const T*>(args.v) + token * args.kv_stride + int64_t{head} * dim, row);
  WriteValue(args.kv.dtype, place.slot, dim, args.kv.v_dim, row,
             block + head * args.kv.head_bytes() + args.kv.k_plane_bytes());
}

// The thread blocks of a token (grid y) share out its heads.
template <typename T>
__global__ void GqaPrepareKernel(GqaPrepareCuda args) {
  extern __shared__ float rows[];
  const int64_t token = blockIdx.x;
  const TokenPlace place = args.places[token];  // Older than the kernel before
  const Angles angles(args.rope, place.position);
  LetNextKernelBegin();
  WaitForKernelBefore();
  float* row = rows + threadIdx.x / 32 * args.head_dim;
  const int heads = args.num_heads + 2 * args.kv.num_kv_heads;
  for (int head = HeadRow(); head < heads; head += gridDim.y * kWarps) {
    PrepareHead<T>(args, token, head, place, angles, row);
    __syncwarp();
  }
}

template <typename T>
__global__ void MlaPrepareKernel(MlaPrepareCuda args) {
  extern __shared__ float rows[];
  const int64_t token = blockIdx.x;
  const TokenPlace place = args.places[token];
  const Angles angles(args.rope, place.position);
  LetNextKernelBegin();
  WaitForKernelBefore();
  const int latent = args.latent_dim, rope_dim = args.rope.dim, k_dim = args.kv.k_dim;
  float* row = rows + threadIdx.x / 32 * (latent + rope_dim);
  const int head = HeadRow();
  if (head > args.num_heads) return;
  if (head < args.num_heads) {
    const int64_t at = token * args.num_heads + head;
    const int head_dim = args.nope_dim + rope_dim;
    const T* from =
        static_cast<const T*>(args.q) + token * args.q_stride + int64_t{head} * head_dim;
    LoadRow(rope_dim, from + args.nope_dim, row);
    RopeRow(args.rope, place.position, angles, row);
    if (!args.absorb) {
      float* to = args.q_out + at * head_dim;
      for (int d = Lane(); d < rope_dim; d += 32) to[args.nope_dim + d] = row[d] * args.scale_log2;
      __syncwarp();
      LoadRow(args.nope_dim, from, row);
      for (int d = Lane(); d < args.nope_dim; d += 32) to[d] = row[d] * args.scale_log2;
      return;
    }
    float* to = args.q_out + at * k_dim + latent;
    for (int d = Lane(); d < k_dim - latent; d += 32) {
      to[d] = d < rope_dim ? row[d] * args.scale_log2 : 0;
    }
    return;
  }
  LoadRow(latent + rope_dim, static_cast<const T*>(args.kv_a) + token * args.kv_a_stride, row);
  NormRow(latent, args.kv_norm, args.norm_eps, row);
  RopeRow(args.rope, place.position, angles, row + latent);
  WriteKey(args.kv.dtype, place.slot, latent + rope_dim, k_dim, row, BlockOf(place, args.layer));
}

}  // namespace

cudaError_t LaunchGqaPrepare(cudaStream_t stream, const GqaPrepareCuda& args) {
  if (args.num_tokens == 0) return cudaSuccess;
  const int heads = args.num_heads + 2 * args.kv.num_kv_heads;
  // Few tokens: as many warps as there are heads. Many: one thread block for each, since the
  // token's place may lie in host memory and its angles cost more than a head.
  constexpr int kManyTokens = 512;
  const int blocks = args.num_tokens < kManyTokens ? (heads + kWarps - 1) / kWarps : 1;
  const dim3 grid(args.num_tokens, blocks);
  const size_t shared_bytes = kWarps * args.head_dim * sizeof(float);
  const auto kernel =
      args.type == ValueType::kF32 ? &GqaPrepareKernel<float> : &GqaPrepareKernel<__nv_bfloat16>;
  return LaunchEarly(stream, kernel, grid, kWarps * 32, shared_bytes, args);
}

cudaError_t LaunchMlaPrepare(cudaStream_t stream, const MlaPrepareCuda& args) {
  if (args.num_tokens == 0) return cudaSuccess;
  const dim3 grid(args.num_tokens, (args.num_heads + 1 + kWarps - 1) / kWarps);
  const size_t shared_bytes = kWarps * (args.latent_dim + args.rope.dim) * sizeof(float);
  const auto kernel =
      args.type == ValueType::kF32 ? &MlaPrepareKernel<float> : &MlaPrepareKernel<__nv_bfloat16>;
  return LaunchEarly(stream, kernel, grid, kWarps * 32, shared_bytes, args);
}

}  // namespace writescope::kernels
