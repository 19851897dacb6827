// How tiles become operands of a warpgroup's products: maps for the kernels and for the test that
// checks them on the host.
//
// An operand's rows (tokens of K, dims of V) have 128 bytes: 64 values along which is summed (dims
// of K, tokens of V). Eight of them, a *chunk*, are four words of a tile one below the other. So a
// lane loads four words from four word rows, and stores them side by side: nothing moves between
// lanes, and no byte is permuted. A warp does 16 operand rows at a time, two chunks of each: its
// loads and its stores are of whole sectors of 32 bytes.
#pragma once

#include "engine/kernels/cuda/attend_maps.h"

namespace writescope::kernels {

inline constexpr int kOperandRowBytes = 128;
inline constexpr int kOperandRowValues = 64;
inline constexpr int kOperandRowChunks = kOperandRowBytes / kChunkBytes;
inline constexpr int kWarpOperandRows = 16;

// A block's keys as an operand are slabs of 64 dims, each with a row of every token; its values are
// one slab with a row of every dim.
inline constexpr int kKeySlabBytes = kBlockTokens * kOperandRowBytes;

// Where a chunk goes in its slab: swizzled, so that the products read rows without bank conflicts.
WRITESCOPE_HOST_DEVICE constexpr int OperandByte(int row, int chunk) {
  return row * kOperandRowBytes + (chunk ^ (row % kOperandRowChunks)) * kChunkBytes;
}

// --- What a lane takes in step c of a warp's 16 operand rows.
WRITESCOPE_HOST_DEVICE constexpr int OperandRow(int lane) { return lane % kWarpOperandRows; }
WRITESCOPE_HOST_DEVICE constexpr int OperandChunk(int lane, int c) {
  return 2 * c + lane / kWarpOperandRows;
}
// Word i of the chunk, from the warp's first operand row on; `row_words` are in a row of the tiles:
// 16 in K, v_dim in V.
WRITESCOPE_HOST_DEVICE constexpr int ChunkWord(int lane, int c, int i, int row_words) {
  return (4 * OperandChunk(lane, c) + i) * row_words + OperandRow(lane);
}

// --- Accumulators of a product of 64 rows. Index i of a lane is of this column, and of the row
// AccumulatorRow(lane, i % 4) of its warp's 16.
WRITESCOPE_HOST_DEVICE constexpr int ProductColumn(int lane, int i) {
  return i / 4 * 8 + 2 * LaneT(lane) + i % 2;
}
// Weights of 16 tokens as A: word a holds the scores of these two indices.
WRITESCOPE_HOST_DEVICE constexpr int WeightIndex(int step, int a, int half) {
  return 8 * step + 2 * a + half;
}

}  // namespace writescope::kernels
