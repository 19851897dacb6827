// Built with -mavx2 -mfma.
#define WRITESCOPE_VECTOR_BYTES 32
#include "engine/kernels/attention_partial_vec.h"

namespace writescope::kernels {

void AttentionPartialAvx2(const FlatAttentionArgs& args) { AttentionPartialVec(args); }

}  // namespace writescope::kernels
