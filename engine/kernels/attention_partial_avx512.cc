// Built with -mavx512f -mavx512bw -mavx512dq -mavx512vl.
#define WRITESCOPE_VECTOR_BYTES 64
#include "engine/kernels/attention_partial_vec.h"

namespace writescope::kernels {

void AttentionPartialAvx512(const FlatAttentionArgs& args) { AttentionPartialVec(args); }
void MixRowAvx512(int64_t count, float keep, float* out, float add, const float* o) {
  MixRowVec(count, keep, out, add, o);
}

}  // namespace writescope::kernels
