// Launches that make matrices on the GPU: conversion, 4-bit quantisation, random values. Used while
// loading only.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "engine/kernels/cuda/value_type.h"

namespace writescope::kernels {

// from [rows, cols] to rows of `to_stride` values of `to_type`; what is beyond cols becomes zero.
cudaError_t LaunchConvertRows(cudaStream_t stream, ValueType from_type, const void* from,
                              int64_t rows, int64_t cols, ValueType to_type, int64_t to_stride,
                              void* to);

// Rows [first_row, first_row + chunk_rows) of a matrix of `rows` rows into its place in `to`, in
// the format of kernels/quantize_int4.h, bit by bit what QuantizeInt4 gives. first_row is a
// multiple of 16, and so is chunk_rows unless it ends the matrix.
cudaError_t LaunchQuantizeInt4(cudaStream_t stream, ValueType from_type, const void* from,
                               int64_t first_row, int64_t chunk_rows, int64_t rows, int64_t cols,
                               std::byte* to);

// to[i] = RandomWeight(seed, first_index + i, sigma), kernels/random_weight.h.
cudaError_t LaunchRandomWeights(cudaStream_t stream, ValueType type, uint64_t seed,
                                int64_t first_index, int64_t count, float sigma, void* to);

}  // namespace writescope::kernels
