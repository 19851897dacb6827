#define WRITESCOPE_VECTOR_BYTES 16
#include "tests/engine/kernels/attention_amx_emulated.h"

#include "engine/kernels/attention_amx_latent.h"
#include "engine/kernels/attention_amx_planes.h"
#include "tests/engine/kernels/amx_emulator.h"

namespace writescope::kernels {
namespace {

struct Tiles : EmulatedTiles {
  static void AttendInF32(const FlatAttentionArgs& args) { AttentionPartialGeneric(args); }
};

}  // namespace

void AttentionPartialAmxEmulated(const AttentionPartialArgs& args) {
  const FlatAttentionArgs flat = {.k_dim = args.k_dim,
                                  .v_dim = args.v_dim,
                                  .value_in_key = args.value_in_key,
                                  .is_f32 = args.dtype == KvDtype::kF32,
                                  .blocks = args.blocks.data(),
                                  .num_blocks = static_cast<int64_t>(args.blocks.size()),
                                  .num_heads = args.num_heads,
                                  .fetch_first = false,
                                  .next = args.next.data(),
                                  .num_next = static_cast<int64_t>(args.next.size()),
                                  .num_rows = args.num_rows,
                                  .q = args.q,
                                  .visible = args.visible,
                                  .o = args.o,
                                  .m = args.m,
                                  .l = args.l,
                                  .kept = args.kept};
  if (args.value_in_key) {
    AttendByPanels<AmxLatent<Tiles>>(flat);
  } else {
    AttendByPanels<AmxPlanes<Tiles>>(flat);
  }
  CHECK(EmulatedTiles::is_released());
}

}  // namespace writescope::kernels
