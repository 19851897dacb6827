// Built with -mavx512f -mavx512bw -mavx512dq -mavx512vl.
#define WRITESCOPE_VECTOR_BYTES 64
#include "engine/kernels/gemm_small_vec.h"

namespace writescope::kernels {

void SmallGemmAvx512(const GemmArgs& args) { SmallGemmVec(args); }

}  // namespace writescope::kernels
