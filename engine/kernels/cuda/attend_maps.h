// Where the words of a tile go in mma.m16n8k16, as the attention kernels use it: maps for kernels
// and for the test that emulates the instruction on the host.
//
// Rows of the instruction are (query, head) pairs; K and V are its B operand. Lane 4 g + t of a
// warp holds: of A, rows g and g + 8 at columns 2t, 2t + 1 (words a0, a1) and 2t + 8, 2t + 9 (a2,
// a3); of B, rows 2t, 2t + 1 (b0) and 2t + 8, 2t + 9 (b1) of column g; of C, columns 2t, 2t + 1 of
// row g (c0, c1) and of row g + 8 (c2, c3).
//
// A *unit* is 32 tokens: two tiles. Columns of the instruction may stand for any tokens as long as
// scores and weights agree. Here column g of product n (of four) is token 4 (g / 2) + n of tile
// g % 2, so 16 consecutive bytes of a word row are one lane's words for the four products, and the
// scores that a lane gets are the weights that it has to hand in: nothing moves between lanes.
#pragma once

#include "engine/base/tile_layout.h"

namespace writescope::kernels {

inline constexpr int kWarpLanes = 32;
inline constexpr int kUnitTokens = 32;
inline constexpr int kUnitsPerBlock = kBlockTokens / kUnitTokens;
inline constexpr int kStepDims = 16;     // Dims of a step of Q K^T
inline constexpr int kGroupDims = 32;    // Dims of the output that a 16-byte load of V serves
inline constexpr int kChunkBytes = 16;   // Four words
inline constexpr int kKeyRowBytes = 64;  // Of a word row of a K tile

WRITESCOPE_HOST_DEVICE constexpr int LaneG(int lane) { return lane >> 2; }
WRITESCOPE_HOST_DEVICE constexpr int LaneT(int lane) { return lane & 3; }

// --- K as B. Word b_r of product n in step j is word n of the 16 bytes at this place of the unit.
WRITESCOPE_HOST_DEVICE constexpr int KeyTile(int lane) { return LaneG(lane) & 1; }
WRITESCOPE_HOST_DEVICE constexpr int KeyChunk(int lane) { return LaneG(lane) >> 1; }
WRITESCOPE_HOST_DEVICE constexpr int KeyRow(int lane, int step, int r) {
  return 8 * step + LaneT(lane) + 4 * r;
}

// --- Scores. Accumulator c of product n is this row and this token of the unit.
WRITESCOPE_HOST_DEVICE constexpr int AccumulatorRow(int lane, int c) {
  return LaneG(lane) + 8 * (c >> 1);
}
WRITESCOPE_HOST_DEVICE constexpr int ScoreToken(int lane, int n, int c) {
  return kTileTokens * (c & 1) + 4 * LaneT(lane) + n;
}
// Weights of tile e as A: word a holds the scores (n, c) and (n + 1, c).
WRITESCOPE_HOST_DEVICE constexpr int WeightProduct(int a) { return 2 * (a >> 1); }
WRITESCOPE_HOST_DEVICE constexpr int WeightAccumulator(int tile, int a) {
  return tile + 2 * (a & 1);
}

// --- V as B. Word b_r of product n, for tile e and 32 dims, is word n of the 16 bytes at this pair
// row of the unit and this dim.
WRITESCOPE_HOST_DEVICE constexpr int ValueRow(int lane, int tile, int r) {
  return 8 * tile + 2 * LaneT(lane) + r;
}
WRITESCOPE_HOST_DEVICE constexpr int ValueDim(int lane) { return 4 * LaneG(lane); }
// Accumulator c of product n is this dim of the 32: a lane's are 8 consecutive ones.
WRITESCOPE_HOST_DEVICE constexpr int OutDim(int lane, int n, int c) {
  return 8 * LaneT(lane) + 4 * (c & 1) + n;
}

// --- The K plane as V, where the value is in the key. The 16 bytes at this word row of the 8 of a
// group (16 dims) and this chunk of tile e hold four tokens of two dims; byte permutations make of
// them the words of the products of the even (0) and the odd (1) dims.
WRITESCOPE_HOST_DEVICE constexpr int LatentRow(int lane) { return LaneG(lane); }
WRITESCOPE_HOST_DEVICE constexpr int LatentChunk(int lane) { return LaneT(lane); }
// For prmt of words 2r and 2r + 1 of the chunk.
WRITESCOPE_HOST_DEVICE constexpr unsigned LatentSelector(int product) {
  return product == 0 ? 0x5410u : 0x7632u;
}
// Accumulator c of a product is this dim of the 16: a lane's are 4 consecutive ones.
WRITESCOPE_HOST_DEVICE constexpr int LatentOutDim(int lane, int product, int c) {
  return 4 * LaneT(lane) + 2 * (c & 1) + product;
}

// --- In shared memory: where chunks of 16 bytes go, so that the 8 lanes that are served at once
// touch all 32 banks.
WRITESCOPE_HOST_DEVICE constexpr int SwizzleKeyChunk(int tile, int row, int chunk) {
  return chunk ^ (2 * ((row >> 1) & 1)) ^ (tile & 1);
}
WRITESCOPE_HOST_DEVICE constexpr int SwizzleValueChunk(int row, int chunk) {
  return chunk ^ (2 * ((row >> 1) & 3));
}

}  // namespace writescope::kernels
