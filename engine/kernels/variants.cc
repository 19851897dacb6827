// The tables of variants, and which entry is in force.
#include "engine/base/check.h"
#include "engine/kernels/attention_partial_flat.h"
#include "engine/kernels/gemm.h"
#include "engine/kernels/gemm_small_flat.h"

namespace writescope::kernels {
namespace {

// Measured: Zen 5 reads a quarter faster this way, Emerald Rapids a tenth slower.
bool FetchesIntoFirstCache() {
  static const bool is_amd = [] {
    __builtin_cpu_init();
    return __builtin_cpu_is("amd") != 0;
  }();
  return is_amd;
}

template <void (*kRun)(const FlatAttentionArgs&)>
void RunAttention(const AttentionPartialArgs& args) {
  DCHECK(args.k_dim % kDimMultiple == 0 && args.v_dim % kDimMultiple == 0);
  DCHECK(args.num_heads >= 1 && args.blocks.size() % static_cast<size_t>(args.num_heads) == 0);
  DCHECK(!args.value_in_key || args.v_dim <= args.k_dim);
  kRun({.k_dim = args.k_dim,
        .v_dim = args.v_dim,
        .value_in_key = args.value_in_key,
        .is_f32 = args.dtype == KvDtype::kF32,
        .blocks = args.blocks.data(),
        .num_blocks = static_cast<int64_t>(args.blocks.size()),
        .num_heads = args.num_heads,
        .fetch_first = FetchesIntoFirstCache(),
        .next = args.next.data(),
        .num_next = static_cast<int64_t>(args.next.size()),
        .num_rows = args.num_rows,
        .q = args.q,
        .visible = args.visible,
        .o = args.o,
        .m = args.m,
        .l = args.l,
        .kept = args.kept});
}

// The last entry up to the active instruction set that `allowed` takes.
template <typename Variant, typename Allowed>
const Variant& Active(std::span<const Variant> variants, const Allowed& allowed) {
  const Variant* active = &variants.front();  // The plainest runs everywhere and rounds nothing.
  for (const Variant& variant : variants) {
    if (variant.isa <= ActiveCpuIsa() && allowed(variant)) active = &variant;
  }
  return *active;
}

}  // namespace

std::span<const AttentionVariant> AttentionVariants() {
  constexpr AttentionProducts kF32 = AttentionProducts::kF32, kBf16 = AttentionProducts::kBf16;
  static constexpr AttentionVariant kVariants[] = {
      {"generic", CpuIsa::kGeneric, kF32, RunAttention<AttentionPartialGeneric>},
      {"avx2", CpuIsa::kAvx2, kF32, RunAttention<AttentionPartialAvx2>},
      {"avx512", CpuIsa::kAvx512, kF32, RunAttention<AttentionPartialAvx512>},
      {"avx512bf16", CpuIsa::kAvx512Bf16, kBf16, RunAttention<AttentionPartialAvx512Bf16>},
      {"amx", CpuIsa::kAmx, kBf16, RunAttention<AttentionPartialAmx>},
  };
  return kVariants;
}

const AttentionVariant& ActiveAttentionVariant(AttentionProducts products) {
  const auto is_exact = [](const AttentionVariant& variant) {
    return variant.products == AttentionProducts::kF32;
  };
  static const AttentionVariant& exact = Active(AttentionVariants(), is_exact);
  const auto is_worth_it = [](const AttentionVariant& variant) {
    return variant.isa != CpuIsa::kAvx512Bf16 || HasFastBf16Products() || IsCpuIsaForced();
  };
  static const AttentionVariant& best = Active(AttentionVariants(), is_worth_it);
  return products == AttentionProducts::kF32 ? exact : best;
}

std::span<const RowMixVariant> RowMixVariants() {
  static constexpr RowMixVariant kVariants[] = {
      {"generic", CpuIsa::kGeneric, MixRowGeneric},
      {"avx2", CpuIsa::kAvx2, MixRowAvx2},
      {"avx512", CpuIsa::kAvx512, MixRowAvx512},
  };
  return kVariants;
}

const RowMixVariant& ActiveRowMixVariant() {
  static const RowMixVariant& active =
      Active(RowMixVariants(), [](const RowMixVariant&) { return true; });
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
  static const SmallGemmVariant& active =
      Active(SmallGemmVariants(), [](const SmallGemmVariant&) { return true; });
  return active;
}

}  // namespace writescope::kernels
