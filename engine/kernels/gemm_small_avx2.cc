// Built with -mavx2 -mfma.
#define WRITESCOPE_VECTOR_BYTES 32
#include "engine/kernels/gemm_small_vec.h"

namespace writescope::kernels {

void SmallGemmAvx2(const GemmArgs& args) { SmallGemmVec(args); }

}  // namespace writescope::kernels
