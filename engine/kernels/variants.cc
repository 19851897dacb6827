// The tables of variants, and which entry is in force.
#include "engine/base/check.h"
#include "engine/kernels/attention_partial_flat.h"
#include "engine/kernels/gemm.h"
#include "engine/kernels/gemm_small_flat.h"

namespace writescope::kernels {
namespace {

template <void (*kRun)(const FlatAttentionArgs&)>
void RunAttention(const AttentionPartialArgs& args) {
  DCHECK(args.k_dim % kDimMultiple == 0 && args.v_dim % kDimMultiple == 0);
  DCHECK(!args.value_in_key || args.v_dim <= args.k_dim);
  kRun({.k_dim = args.k_dim,
        .v_dim = args.v_dim,
        .value_in_key = args.value_in_key,
        .is_f32 = args.dtype == KvDtype::kF32,
        .blocks = args.blocks.data(),
        .num_blocks = static_cast<int64_t>(args.blocks.size()),
        .num_rows = args.num_rows,
        .q = args.q,
        .visible = args.visible,
        .o = args.o,
        .m = args.m,
        .l = args.l});
}

template <typename Variant>
const Variant& Active(std::span<const Variant> variants) {
  for (const Variant& variant : variants) {
    if (variant.isa == ActiveCpuIsa()) return variant;
  }
  CHECK(false) << "no variant for " << std::string(CpuIsaName(ActiveCpuIsa()));
  return variants.front();
}

}  // namespace

std::span<const AttentionVariant> AttentionVariants() {
  static constexpr AttentionVariant kVariants[] = {
      {"generic", CpuIsa::kGeneric, RunAttention<AttentionPartialGeneric>},
      {"avx2", CpuIsa::kAvx2, RunAttention<AttentionPartialAvx2>},
      {"avx512", CpuIsa::kAvx512, RunAttention<AttentionPartialAvx512>},
  };
  return kVariants;
}

const AttentionVariant& ActiveAttentionVariant() {
  static const AttentionVariant& active = Active(AttentionVariants());
  return active;
}

std::span<const SmallGemmVariant> SmallGemmVariants() {
  static constexpr SmallGemmVariant kVariants[] = {
      {"generic", CpuIsa::kGeneric, SmallGemmGeneric},
      {"avx2", CpuIsa::kAvx2, SmallGemmAvx2},
      {"avx512", CpuIsa::kAvx512, SmallGemmAvx512},
  };
  return kVariants;
}

const SmallGemmVariant& ActiveSmallGemmVariant() {
  static const SmallGemmVariant& active = Active(SmallGemmVariants());
  return active;
}

}  // namespace writescope::kernels
