// Built with -mamx-tile -mamx-bf16 and AVX512-BF16, which every processor with AMX has.
#define WRITESCOPE_VECTOR_BYTES 64
#include "engine/kernels/attention_amx_latent.h"
#include "engine/kernels/attention_amx_planes.h"

namespace writescope::kernels {
namespace {

struct HardwareTiles : AmxTiles {
  static void AttendInF32(const FlatAttentionArgs& args) { AttentionPartialAvx512(args); }
};

}  // namespace

void AttentionPartialAmx(const FlatAttentionArgs& args) {
  if (args.value_in_key) {
    AttendByPanels<AmxLatent<HardwareTiles>>(args);
  } else {
    AttendByPanels<AmxPlanes<HardwareTiles>>(args);
  }
}

}  // namespace writescope::kernels
