// For any x86-64: 16-byte vectors, no fused multiply-add.
#define WRITESCOPE_VECTOR_BYTES 16
#include "engine/kernels/attention_partial_vec.h"

namespace writescope::kernels {

void AttentionPartialGeneric(const FlatAttentionArgs& args) { AttentionPartialVec(args); }
void MixRowGeneric(int64_t count, float keep, float* out, float add, const float* o) {
  MixRowVec(count, keep, out, add, o);
}

}  // namespace writescope::kernels
