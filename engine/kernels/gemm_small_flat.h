// The entry points of the files that are built once for each instruction set; see simd_vec.h.
#pragma once

#include "engine/kernels/gemm.h"

namespace writescope::kernels {

void SmallGemmGeneric(const GemmArgs& args);
void SmallGemmAvx2(const GemmArgs& args);
void SmallGemmAvx512(const GemmArgs& args);

}  // namespace writescope::kernels
