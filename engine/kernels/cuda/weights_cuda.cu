#include "engine/kernels/cuda/values.h"
#include "engine/kernels/cuda/weights_cuda.h"
#include "engine/kernels/quantize_int4.h"
#include "engine/kernels/random_weight.h"

namespace writescope::kernels {
namespace {

constexpr int kThreads = 256;

int BlocksFor(int64_t count) {
  constexpr int64_t kMaxBlocks = 8192;
  const int64_t blocks = (count + kThreads - 1) / kThreads;
  return static_cast<int>(blocks < kMaxBlocks ? blocks : kMaxBlocks);
}

__device__ int64_t FirstItem() { return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; }
__device__ int64_t ItemStride() { return static_cast<int64_t>(gridDim.x) * kThreads; }

template <typename From, typename To>
__global__ void ConvertRowsKernel(const From* from, int64_t rows, int64_t cols, int64_t to_stride,
                                  To* to) {
  for (int64_t i = FirstItem(); i < rows * to_stride; i += ItemStride()) {
    const int64_t row = i / to_stride, col = i % to_stride;
    to[i] = FromFloat<To>(col < cols ? ToFloat(from[row * cols + col]) : 0.0f);
  }
}

template <typename From>
void ConvertRows(cudaStream_t stream, const void* from, int64_t rows, int64_t cols,
                 ValueType to_type, int64_t to_stride, void* to) {
  const int blocks = BlocksFor(rows * to_stride);
  if (to_type == ValueType::kF32) {
    ConvertRowsKernel<<<blocks, kThreads, 0, stream>>>(static_cast<const From*>(from), rows, cols,
                                                       to_stride, static_cast<float*>(to));
  } else {
    ConvertRowsKernel<<<blocks, kThreads, 0, stream>>>(static_cast<const From*>(from), rows, cols,
                                                       to_stride, static_cast<__nv_bfloat16*>(to));
  }
}

// A warp takes a group: a row of the padded tiles and 128 columns. `scales` is of the first row.
template <typename From>
__global__ void Int4ScalesKernel(const From* from, int64_t chunk_rows, int64_t cols,
                                 __nv_bfloat16* scales) {
  const int64_t groups = Int4Groups(cols);
  const int64_t count = Int4RowTiles(chunk_rows) * kInt4TileRows * groups;
  for (int64_t i = FirstItem() / 32; i < count; i += ItemStride() / 32) {
    const int64_t row = i / groups, group = i % groups;
    float least = 0, most = 0;
    for (int j = threadIdx.x % 32; j < kInt4GroupCols; j += 32) {
      const int64_t col = group * kInt4GroupCols + j;
      if (row < chunk_rows && col < cols) {
        const float value = ToFloat(from[row * cols + col]);
        least = fminf(least, value);
        most = fmaxf(most, value);
      }
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      least = fminf(least, __shfl_xor_sync(0xffffffffu, least, offset));
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, offset));
    }
    if (threadIdx.x % 32 == 0) {
      const int64_t block = row / kInt4TileRows * groups + group;
      scales[block * kInt4TileRows + Int4ScaleIndex(row % kInt4TileRows)] =
          __float2bfloat16_rn(Int4Scale(least, most));
    }
  }
}

// A thread takes a word of eight.
template <typename From>
__global__ void Int4QuantsKernel(const From* from, int64_t chunk_rows, int64_t cols,
                                 const __nv_bfloat16* scales, uint32_t* words) {
  const int64_t groups = Int4Groups(cols);
  const int64_t count = Int4RowTiles(chunk_rows) * groups * kInt4GroupWords;
  for (int64_t i = FirstItem(); i < count; i += ItemStride()) {
    const int64_t block = i / kInt4GroupWords;
    const int word = static_cast<int>(i % kInt4GroupWords);
    uint32_t bits = 0;
    for (int nibble = 0; nibble < 8; ++nibble) {
      const int tile_row = Int4Row(word, nibble);
      const int64_t row = block / groups * kInt4TileRows + tile_row;
      const int64_t col = block % groups * kInt4GroupCols + Int4Col(word, nibble);
      const float scale = ToFloat(scales[block * kInt4TileRows + Int4ScaleIndex(tile_row)]);
      int q = 0;
      if (row < chunk_rows && col < cols && scale != 0) {
        const float rounded = rintf(ToFloat(from[row * cols + col]) / scale);
        q = static_cast<int>(fminf(fmaxf(rounded, kInt4Min), kInt4Max));
      }
      bits |= static_cast<uint32_t>(q + kInt4Bias) << (4 * nibble);
    }
    words[i] = bits;
  }
}

template <typename From>
void QuantizeInt4(cudaStream_t stream, const void* from, int64_t first_row, int64_t chunk_rows,
                  int64_t rows, int64_t cols, std::byte* to) {
  const int64_t first_block = first_row / kInt4TileRows * Int4Groups(cols);
  const int64_t blocks = Int4RowTiles(chunk_rows) * Int4Groups(cols);
  auto* words = reinterpret_cast<uint32_t*>(to) + first_block * kInt4GroupWords;
  auto* scales = reinterpret_cast<__nv_bfloat16*>(to + Int4QuantBytes(rows, cols)) +
                 first_block * kInt4TileRows;
  const From* values = static_cast<const From*>(from);
  Int4ScalesKernel<<<BlocksFor(blocks * kInt4TileRows * 32), kThreads, 0, stream>>>(
      values, chunk_rows, cols, scales);
  Int4QuantsKernel<<<BlocksFor(blocks * kInt4GroupWords), kThreads, 0, stream>>>(
      values, chunk_rows, cols, scales, words);
}

template <typename T>
__global__ void RandomWeightsKernel(uint64_t seed, int64_t first_index, int64_t count, float sigma,
                                    T* to) {
  for (int64_t i = FirstItem(); i < count; i += ItemStride()) {
    to[i] = FromFloat<T>(RandomWeight(seed, static_cast<uint64_t>(first_index + i), sigma));
  }
}

}  // namespace

cudaError_t LaunchConvertRows(cudaStream_t stream, ValueType from_type, const void* from,
                              int64_t rows, int64_t cols, ValueType to_type, int64_t to_stride,
                              void* to) {
  if (from_type == ValueType::kF32) {
    ConvertRows<float>(stream, from, rows, cols, to_type, to_stride, to);
  } else {
    ConvertRows<__nv_bfloat16>(stream, from, rows, cols, to_type, to_stride, to);
  }
  return cudaGetLastError();
}

cudaError_t LaunchQuantizeInt4(cudaStream_t stream, ValueType from_type, const void* from,
                               int64_t first_row, int64_t chunk_rows, int64_t rows, int64_t cols,
                               std::byte* to) {
  if (from_type == ValueType::kF32) {
    QuantizeInt4<float>(stream, from, first_row, chunk_rows, rows, cols, to);
  } else {
    QuantizeInt4<__nv_bfloat16>(stream, from, first_row, chunk_rows, rows, cols, to);
  }
  return cudaGetLastError();
}

cudaError_t LaunchRandomWeights(cudaStream_t stream, ValueType type, uint64_t seed,
                                int64_t first_index, int64_t count, float sigma, void* to) {
  if (type == ValueType::kF32) {
    RandomWeightsKernel<<<BlocksFor(count), kThreads, 0, stream>>>(seed, first_index, count, sigma,
                                                                   static_cast<float*>(to));
  } else {
    RandomWeightsKernel<<<BlocksFor(count), kThreads, 0, stream>>>(seed, first_index, count, sigma,
                                                                   static_cast<__nv_bfloat16*>(to));
  }
  return cudaGetLastError();
}

}  // namespace writescope::kernels
