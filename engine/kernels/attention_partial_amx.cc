// Built with -mamx-tile -mamx-bf16 and AVX512-BF16, which every processor with AMX has.
#define WRITESCOPE_VECTOR_BYTES 64
#include "engine/kernels/attention_amx_blocks.h"

namespace writescope::kernels {
namespace {

struct HardwareTiles : AmxTiles {
  static void AttendInF32(const FlatAttentionArgs& args) { AttentionPartialAvx512(args); }
};

}  // namespace

void AttentionPartialAmx(const FlatAttentionArgs& args) {
  AttendByPanels<AmxKernel<HardwareTiles>>(args);
}

}  // namespace writescope::kernels
