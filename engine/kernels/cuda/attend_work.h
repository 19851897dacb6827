// What the attention kernels are told: plain data that the host writes and the device reads.
//
// Two ways to share out the work. In *slices*: rows in panels of at most 16 (query row, head)
// pairs; all panels' blocks in one line, cut into equal chunks for the thread blocks; each stretch
// of one panel in one chunk leaves a partial, and the partials of a row are folded into its state
// in order. That is for few rows and many keys. In *tiles*: a thread block takes many rows of one
// reader through all its spans and goes on from their states. That is for prefill.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/base/tile_layout.h"

namespace writescope::kernels {

inline constexpr float kMinusInf = -__builtin_huge_valf();
inline constexpr int kPanelSlots = 16;  // The rows of an MMA

// Rows and states of a call; see AttendArgs in ops.h. Where m is -inf nothing was seen, and o
// may hold anything.
struct AttendRows {
  KvGeometry kv;
  int num_heads;
  const float* q;  // Device [rows, num_heads, k_dim]
  float* o;        // Device [rows, num_heads, v_dim]
  float* m;        // Device [rows, num_heads]
  float* l;
};

// Consecutive blocks at consecutive addresses.
struct KvSpan {
  const std::byte* base;  // In layer 0 of the call
  int64_t first_position;
  int64_t layer_stride_bytes;
  int32_t num_tokens;
  int32_t first_block;  // In a call of tiles: blocks of the spans before it
};

// Up to 16 (query row, head of the KV head's group) pairs and a span that they all read. Slot i is
// row i / num_heads, head first_head + i % num_heads.
struct Panel {
  KvSpan span;
  int32_t first_block;  // Of the line of all panels' blocks
  int32_t first_row;    // In SliceArrays::rows
  int16_t num_rows;
  int16_t first_head;
  int16_t num_heads;
  int16_t reserved;
};

struct PanelRow {
  int64_t visible;  // Positions below this are seen.
  int32_t row;
  int32_t fold;  // In SliceArrays::folds
};

// Slices of one row in order: partials [first_slice, first_slice + num_slices) at one slot.
struct FoldPart {
  int32_t first_slice;
  int32_t num_slices;
  int32_t first_slot;
};

// What is folded into the states of heads [first_head, first_head + num_heads) of each group.
struct FoldRow {
  int32_t row;
  int16_t first_head;
  int16_t num_heads;
  int32_t first_part;
  int32_t num_parts;
  int32_t num_slices;  // Of all parts
};

struct SliceSizes {
  int32_t num_panels;
  int32_t num_blocks;  // Of all panels
  int32_t num_chunks;  // At most num_blocks
  int32_t num_slots;   // Of a partial: the most that a panel has
  int32_t num_rows;
  int32_t num_folds;
  int32_t num_parts;
  int32_t max_fold_slices;  // The most that a row has
};

// Chunk c is blocks [ChunkBegin(c), ChunkBegin(c + 1)) of the line; ChunkOf is its inverse. The
// part of panel p in chunk c is slice c + p: unique, and consecutive for a panel.
WRITESCOPE_HOST_DEVICE constexpr int ChunkBegin(const SliceSizes& sizes, int chunk) {
  return static_cast<int>(static_cast<int64_t>(chunk) * sizes.num_blocks / sizes.num_chunks);
}
WRITESCOPE_HOST_DEVICE constexpr int ChunkOf(const SliceSizes& sizes, int block) {
  return static_cast<int>((static_cast<int64_t>(block + 1) * sizes.num_chunks - 1) /
                          sizes.num_blocks);
}
WRITESCOPE_HOST_DEVICE constexpr int NumSlices(const SliceSizes& sizes) {
  return sizes.num_chunks + sizes.num_panels - 1;
}

// Arrays of a call lie behind each other, 8-aligned, in the order of these offsets.
struct SliceArrays {
  const Panel* panels;
  const PanelRow* rows;
  const FoldRow* folds;
  const FoldPart* parts;
};
WRITESCOPE_HOST_DEVICE constexpr int64_t SliceArrayBytes(const SliceSizes& s) {
  return s.num_panels * int64_t{sizeof(Panel)} + s.num_rows * int64_t{sizeof(PanelRow)} +
         s.num_folds * int64_t{sizeof(FoldRow)} + s.num_parts * int64_t{sizeof(FoldPart)};
}
WRITESCOPE_HOST_DEVICE inline SliceArrays FindSliceArrays(const std::byte* at,
                                                          const SliceSizes& s) {
  SliceArrays arrays;
  arrays.panels = reinterpret_cast<const Panel*>(at);
  arrays.rows = reinterpret_cast<const PanelRow*>(arrays.panels + s.num_panels);
  arrays.folds = reinterpret_cast<const FoldRow*>(arrays.rows + s.num_rows);
  arrays.parts = reinterpret_cast<const FoldPart*>(arrays.folds + s.num_folds);
  return arrays;
}

// Arrays up to this size travel in the parameters of the launch: a read of host memory over a busy
// link would cost a small call more than its work.
inline constexpr int kInlineBytes = 3584;

// Running states of slices: index (slice * num_kv_heads + kv_head) * num_slots + slot.
struct Partials {
  float* o;  // Device [.., v_dim]
  float* m;  // -inf where nothing was seen; o is then not written.
  float* l;
};

struct SliceCall {
  AttendRows rows;
  SliceSizes sizes;
  // Device, or null. One plan for many calls: sizes and arrays are here, the arrays right behind
  // (with kInlineBytes that may be read in any case), and `sizes` tells the largest num_chunks
  // only.
  const SliceSizes* staged;
  int32_t layer;
  Partials partials;
  const std::byte* arrays;  // Device; null: `inlined`
  alignas(16) std::byte inlined[kInlineBytes];
};

// The rows of one reader, in tiles of (query row, head of the group) pairs, and its spans.
struct TileReader {
  int64_t first_position;
  int32_t first_row;
  int32_t num_rows;
  int32_t first_tile;
  int32_t first_span;
  int32_t num_spans;
  int32_t first_block;  // Blocks of the spans of the readers before it
};

struct TileSizes {
  int32_t num_readers;
  int32_t num_spans;
  int32_t num_tiles;
  int32_t num_blocks;  // Of all spans
};

struct TileArrays {
  const TileReader* readers;
  const KvSpan* spans;
};
WRITESCOPE_HOST_DEVICE constexpr int64_t TileArrayBytes(const TileSizes& s) {
  return s.num_readers * int64_t{sizeof(TileReader)} + s.num_spans * int64_t{sizeof(KvSpan)};
}
WRITESCOPE_HOST_DEVICE inline TileArrays FindTileArrays(const std::byte* at, const TileSizes& s) {
  TileArrays arrays;
  arrays.readers = reinterpret_cast<const TileReader*>(at);
  arrays.spans = reinterpret_cast<const KvSpan*>(arrays.readers + s.num_readers);
  return arrays;
}

struct TileCall {
  AttendRows rows;
  TileSizes sizes;
  std::byte* scratch;       // Device; see TileKernel::scratch_block_bytes
  const std::byte* arrays;  // Device; null: `inlined`
  alignas(16) std::byte inlined[kInlineBytes];
};

}  // namespace writescope::kernels
