// The AMX kernel of attention on emulated tiles and 16-byte vectors.
#pragma once

#include "engine/kernels/attention_partial.h"

namespace writescope::kernels {

void AttentionPartialAmxEmulated(const AttentionPartialArgs& args);

}  // namespace writescope::kernels
