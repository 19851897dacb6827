// Built with -mavx2 -mfma.
#define WRITESCOPE_VECTOR_BYTES 32
#include "engine/kernels/attention_partial_vec.h"

namespace writescope::kernels {

void AttentionPartialAvx2(const FlatAttentionArgs& args) { AttentionPartialVec(args); }
void MixRowAvx2(int64_t count, float keep, float* out, float add, const float* o) {
  MixRowVec(count, keep, out, add, o);
}

}  // namespace writescope::kernels
