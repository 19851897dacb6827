// y (+)= x * W^T with W as it is stored: [N, K] row-major, float32, bf16 or 4-bit rows. x and y are
// float32.
// Products and sums are f32, in an order that depends on the shapes and not on threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "engine/base/cpu_features.h"
#include "engine/kernels/int4_rows.h"

namespace writescope::kernels {

// Rows of W that a caller should give one call: a panel. Where the rows of a matrix are cut changes
// no bit of the small path; of the large one it may, so callers always cut at multiples of this.
inline constexpr int64_t kGemmPanelRows = 128;
// Up to this many rows of x the small path is used: it reads W once, straight from its storage, or,
// of 4 bits, from a block in scratch.
// Above, a panel of W is brought to float32 in scratch, block by block, and handed to OpenBLAS,
// whose packing pays from here on: on a Zen 4 core with 2,048 columns of bf16 the small path does
// 89 GFLOP/s from 4 rows to 64, OpenBLAS 20 at 9 rows, 67 at 64 and 88 at 256.
inline constexpr int64_t kSmallGemmRows = 64;
// Columns of W that are brought to float32 at a time: with kGemmPanelRows rows 512 KiB, inside L2.
inline constexpr int64_t kGemmBlockCols = 1024;
inline constexpr int64_t kGemmScratchFloats = kGemmPanelRows * kGemmBlockCols;

// How a row of W is stored: kInt4 as int4_rows.h says.
enum class GemmWeights { kF32, kBf16, kInt4 };
constexpr int64_t GemmRowBytes(GemmWeights type, int64_t k) {
  if (type == GemmWeights::kInt4) return Int4RowBytes(k);
  return k * (type == GemmWeights::kBf16 ? 2 : 4);
}

struct GemmArgs {
  int64_t num_rows = 0;  // T, of x and y
  int64_t n = 0;         // Rows of W, at most kGemmPanelRows.
  int64_t k = 0;         // Columns of W and x
  const float* x = nullptr;
  int64_t x_stride = 0;          // Floats from one row of x to the next.
  const std::byte* w = nullptr;  // [n, k]
  GemmWeights type = GemmWeights::kBf16;
  float* y = nullptr;  // [num_rows, n], rows y_stride apart
  int64_t y_stride = 0;
  bool accumulate = false;
};

// One panel. `scratch` [kGemmScratchFloats] is the caller's; one for each thread.
void GemmPanel(const GemmArgs& args, float* scratch);

// The twin, in double.
void GemmRef(const GemmArgs& args);

// The small path for any number of rows of x, W of float32 or bf16; a file for each instruction
// set.
struct SmallGemmVariant {
  std::string_view name;
  CpuIsa isa;
  void (*run)(const GemmArgs&);
};
std::span<const SmallGemmVariant> SmallGemmVariants();
const SmallGemmVariant& ActiveSmallGemmVariant();

// Packaged builds of OpenBLAS have computed nonsense on processors younger than they are. Compares
// its sgemm with plain loops at a few shapes, also called by several threads at once; returns what
// is wrong and what to do, or nothing.
std::string BlasSelfTest();

}  // namespace writescope::kernels
