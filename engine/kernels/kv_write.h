// Writes one token's key and value into the tiles of a block; see base/tile_layout.h. With bf16
// words values are rounded to nearest, ties to even. The padding dims are written as zeros.
#pragma once

#include <cstddef>

#include "engine/base/tile_layout.h"

namespace writescope::kernels {

// `k_plane` is of one KV head of the block; slot in [0, 64); values [dim], dim <= k_dim.
void WriteKey(int slot, int dim, int k_dim, KvDtype dtype, const float* values, std::byte* k_plane);
void WriteValue(int slot, int dim, int v_dim, KvDtype dtype, const float* values,
                std::byte* v_plane);

}  // namespace writescope::kernels
