// For any x86-64.
#define WRITESCOPE_VECTOR_BYTES 16
#include "engine/kernels/gemm_small_vec.h"

namespace writescope::kernels {

void SmallGemmGeneric(const GemmArgs& args) { SmallGemmVec(args); }

}  // namespace writescope::kernels
