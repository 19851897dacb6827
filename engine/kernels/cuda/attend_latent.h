// Kernels for caches whose value is in the key (MLA); see attend_launch.h.
#pragma once

#include "engine/kernels/cuda/attend_launch.h"

namespace writescope::kernels {

SliceKernel LatentDecodeKernel(const KvGeometry& kv);
TileKernel LatentPrefillKernel(const KvGeometry& kv);

}  // namespace writescope::kernels
