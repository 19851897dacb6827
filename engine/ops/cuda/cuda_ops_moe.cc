// Matrix products, the gated MLP and the mixture of experts on the GPU.
#include <algorithm>
#include <utility>

#include "engine/base/check.h"
#include "engine/kernels/cuda/elementwise_cuda.h"
#include "engine/kernels/cuda/small_product.h"
#include "engine/ops/cuda/cuda_ops_impl.h"

namespace writescope::ops {
namespace {

// Of the bytes between two matrices of one shape and type, in values; false when that is no whole
// number.
bool ValuesBetween(const Matrix& a, const Matrix& b, int64_t value_bytes, int64_t* values) {
  const int64_t bytes = b.data - a.data;
  *values = bytes / value_bytes;
  return bytes % value_bytes == 0 && a.rows == b.rows && a.cols == b.cols && a.type == b.type;
}

kernels::RouterConfig RouterConfigOf(const MoeArgs& args) {
  return {.num_experts = static_cast<int>(args.experts.size()),
          .experts_per_token = args.experts_per_token,
          .renormalize = args.renormalize,
          .routed_scale = args.routed_scale,
          .num_groups = args.num_groups,
          .topk_groups = args.topk_groups};
}

}  // namespace

BlasProduct CudaOps::ProductOf(int64_t num_rows, const void* x, int64_t x_stride, const Matrix& w,
                               void* y, int64_t y_stride) const {
  CHECK(w.type == WeightTypeOf(options_.compute)) << "a dense matrix of another type";
  return {.num_rows = num_rows,
          .rows = w.rows,
          .cols = w.cols,
          .type = type_,
          .x = x,
          .x_stride = x_stride,
          .w = w.data,
          .w_stride = w.type == WeightType::kF32 ? w.cols : kernels::Bf16Stride(w.cols),
          .y_type = type_,
          .y = y,
          .y_stride = y_stride};
}

void CudaOps::Multiply(const BlasProduct& product) {
  if (product.num_rows == 0) return;
  if (type_ == kernels::ValueType::kBf16 && !options_.force_simt && product.w_batch % 8 == 0 &&
      kernels::IsSmallProduct(product.num_rows, product.rows, product.cols, product.batch)) {
    Check(kernels::LaunchSmallProduct(stream(), {.num_rows = static_cast<int>(product.num_rows),
                                                 .rows = static_cast<int>(product.rows),
                                                 .cols = static_cast<int>(product.cols),
                                                 .x = product.x,
                                                 .x_stride = product.x_stride,
                                                 .w = static_cast<const std::byte*>(product.w),
                                                 .w_stride = product.w_stride,
                                                 .y_type = product.y_type,
                                                 .y = product.y,
                                                 .y_stride = product.y_stride,
                                                 .alpha = product.alpha,
                                                 .accumulate = product.beta != 0,
                                                 .batch = product.batch,
                                                 .x_batch = product.x_batch,
                                                 .w_batch = product.w_batch,
                                                 .y_batch = product.y_batch}),
          "matrix product of few rows");
    return;
  }
  device_.compute().Check(cublas_->Multiply(product));
}

std::optional<int64_t> CudaOps::SpacingOf(std::span<const Matrix> matrices) const {
  int64_t spacing = 0;
  for (size_t i = 1; i < matrices.size(); ++i) {
    int64_t values = 0;
    if (!ValuesBetween(matrices[i - 1], matrices[i], kernels::ValueBytes(type_), &values)) {
      return std::nullopt;
    }
    if (i == 1) spacing = values;
    if (values != spacing || values < 0) return std::nullopt;
  }
  return spacing;
}

void CudaOps::MultiplyHeads(std::span<const Matrix> heads, BlasProduct product, int64_t x_head,
                            int64_t y_head) {
  const int num_heads = static_cast<int>(heads.size());
  const int64_t value_bytes = kernels::ValueBytes(type_);
  if (const std::optional<int64_t> spacing = SpacingOf(heads)) {
    product.w_batch = *spacing;
    product.batch = num_heads;
    product.x_batch = x_head;
    product.y_batch = y_head;
    Multiply(product);
    return;
  }
  const int64_t y_bytes = kernels::ValueBytes(product.y_type);
  for (int h = 0; h < num_heads; ++h) {
    BlasProduct one = product;
    one.w = heads[h].data;
    one.x = static_cast<const std::byte*>(product.x) + h * x_head * value_bytes;
    one.y = static_cast<std::byte*>(product.y) + h * y_head * y_bytes;
    Multiply(one);
  }
}

void CudaOps::Linear(int num_rows, const void* x, const Matrix& w, void* out, bool accumulate) {
  BlasProduct product = ProductOf(num_rows, x, w.cols, w, out, w.rows);
  product.beta = accumulate ? 1 : 0;
  Multiply(product);
}

void CudaOps::Mlp(int num_rows, const void* x, const MlpWeights& w, void* out) {
  const int64_t width = w.gate.rows, hidden = w.gate.cols;
  CHECK_LE(width, limits_.max_mlp_width);
  for (int first = 0; first < num_rows; first += layout_.wave_tokens) {
    const int rows = std::min(layout_.wave_tokens, num_rows - first);
    std::byte* gate = Workspace<std::byte>(layout_.activated);
    std::byte* up = Activation(gate, rows * width);
    const std::byte* wave_x = Activation(x, first * hidden);
    // Gate and up lie beside each other: one launch of two products.
    BlasProduct product = ProductOf(rows, wave_x, hidden, w.gate, gate, width);
    if (ValuesBetween(w.gate, w.up, kernels::ValueBytes(type_), &product.w_batch) &&
        product.w_batch >= 0) {
      product.batch = 2;
      product.y_batch = rows * width;
      Multiply(product);
    } else {
      Multiply(product);
      Multiply(ProductOf(rows, wave_x, hidden, w.up, up, width));
    }
    Check(kernels::LaunchSwiGlu(stream(), type_, rows * width, gate, up, gate), "activation");
    product = ProductOf(rows, gate, width, w.down, Activation(out, first * hidden), hidden);
    product.beta = 1;
    Multiply(product);
  }
}

kernels::ExpertWeights CudaOps::expert_weights(const Matrix& w) const {
  if (w.type == WeightType::kInt4) return kernels::ExpertWeights::kInt4;
  CHECK(w.type == WeightTypeOf(options_.compute)) << "experts of another type";
  return w.type == WeightType::kF32 ? kernels::ExpertWeights::kF32 : kernels::ExpertWeights::kBf16;
}

kernels::ExpertPlan CudaOps::PlanExperts(const MoeArgs& args, int num_tokens) const {
  if (options_.force_simt || type_ == kernels::ValueType::kF32) {
    return {kernels::ExpertKernel::kSimt, kernels::kSimtSlots};
  }
  const Matrix& gate = args.experts[0].gate;
  const int width = static_cast<int>(gate.rows);
  const kernels::ExpertMatrix in = {
      .weights = expert_weights(gate), .rows = width, .cols = args.hidden, .gated = true};
  const kernels::ExpertMatrix out = {.weights = in.weights, .rows = args.hidden, .cols = width};
  const auto can = [&](kernels::ExpertKernel kernel) {
    return kernels::CanRun(kernel, in) && kernels::CanRun(kernel, out);
  };
  return kernels::PlanExpertGemm(
      {.weights = in.weights,
       .pairs_per_expert = static_cast<double>(num_tokens) * args.experts_per_token /
                           static_cast<double>(args.experts.size()),
       .ring = can(kernels::ExpertKernel::kRing),
       .wide = can(kernels::ExpertKernel::kWide)});
}

void CudaOps::RunExperts(const kernels::ExpertGemmArgs& args, const kernels::ExpertPlan& plan) {
  Check(kernels::LaunchExpertGemm(stream(), type_, plan, args), "experts");
}

// The experts of tokens [first, first + num_tokens), and the order of the pairs.
void CudaOps::Route(const MoeArgs& args, int first, int num_tokens, int tile_slots) {
  const int k = args.experts_per_token, num_experts = static_cast<int>(args.experts.size());
  const int num_pairs = num_tokens * k;
  float* logits = Workspace<float>(layout_.logits);
  int32_t* experts = Workspace<int32_t>(layout_.experts);
  float* weights = Workspace<float>(layout_.weights);
  BlasProduct router = ProductOf(num_tokens, Activation(args.x, int64_t{first} * args.hidden),
                                 args.hidden, args.router, logits, num_experts);
  router.y_type = kernels::ValueType::kF32;
  Multiply(router);
  const size_t choice_bytes = static_cast<size_t>(num_pairs) * sizeof(int32_t);
  const bool replay = args.choice.replay != nullptr;
  if (replay) {
    const int32_t* from = args.choice.replay + int64_t{first} * k;
    for (int i = 0; i < num_pairs; ++i) {
      CHECK(from[i] >= 0 && from[i] < num_experts) << "expert " << from[i];
    }
    Check(cudaMemcpyAsync(experts, from, choice_bytes, cudaMemcpyHostToDevice, stream()),
          "given experts");
  }
  Check(kernels::LaunchRoute(stream(), RouterConfigOf(args), num_tokens, logits, replay, experts,
                             weights),
        "router");
  if (args.choice.record != nullptr) {
    Check(cudaMemcpyAsync(args.choice.record + int64_t{first} * k, experts, choice_bytes,
                          cudaMemcpyDeviceToHost, stream()),
          "chosen experts");
  }
  Check(kernels::LaunchSortPairs(stream(), num_experts, num_pairs, tile_slots, experts,
                                 Workspace<int32_t>(layout_.slot_pairs),
                                 Workspace<kernels::ExpertTile>(layout_.tiles)),
        "order of experts");
}

// The same for all tokens, with the first norm, in one launch; false where that cannot be done.
bool CudaOps::RouteFew(const MoeArgs& args, int tile_slots) {
  if (options_.force_simt || type_ != kernels::ValueType::kBf16 ||
      args.num_tokens > std::min(kernels::kRouteFewTokens, layout_.wave_tokens) ||
      args.choice.record != nullptr || args.choice.replay != nullptr) {
    return false;
  }
  const bool norms = args.first_norm != nullptr;
  const BlasProduct router = ProductOf(0, nullptr, 0, args.router, nullptr, 0);
  const kernels::RouteFewArgs call = {.config = RouterConfigOf(args),
                                      .num_tokens = args.num_tokens,
                                      .hidden = args.hidden,
                                      .x = norms ? args.out : args.x,
                                      .norm = args.first_norm,
                                      .norm_eps = args.norm_eps,
                                      .normed = args.normed,
                                      .router = static_cast<const std::byte*>(router.w),
                                      .router_stride = router.w_stride,
                                      .tile_slots = tile_slots,
                                      .num_tiles = static_cast<int>(kernels::MaxExpertTiles(
                                          int64_t{args.num_tokens} * args.experts_per_token,
                                          static_cast<int>(args.experts.size()), tile_slots)),
                                      .logits = Workspace<float>(layout_.logits),
                                      .arrivals = Workspace<uint32_t>(layout_.arrivals),
                                      .experts = Workspace<int32_t>(layout_.experts),
                                      .weights = Workspace<float>(layout_.weights),
                                      .slot_pairs = Workspace<int32_t>(layout_.slot_pairs),
                                      .tiles = Workspace<kernels::ExpertTile>(layout_.tiles)};
  if (!kernels::RoutesFew(call)) return false;
  Check(kernels::LaunchRouteFew(stream(), call), "router of few tokens");
  return true;
}

void CudaOps::RunMoeWave(const MoeArgs& args, int first, int num_tokens,
                         const kernels::ExpertPlan& plan) {
  const int k = args.experts_per_token, num_experts = static_cast<int>(args.experts.size());
  const int num_pairs = num_tokens * k;
  const int64_t hidden = args.hidden;
  const std::byte* x = Activation(args.x, first * hidden);
  const MlpWeights& expert = args.experts[0];
  const int64_t width = expert.gate.rows;
  kernels::ExpertGemmArgs gemm = {
      .weights = expert_weights(expert.gate),
      .rows = static_cast<int>(width),
      .cols = args.hidden,
      .w = expert.gate.data,
      .up = expert.up.data,
      .expert_stride_bytes =
          num_experts > 1 ? args.experts[1].gate.data - expert.gate.data : int64_t{0},
      .tiles = Workspace<kernels::ExpertTile>(layout_.tiles),
      .num_tiles =
          static_cast<int>(kernels::MaxExpertTiles(num_pairs, num_experts, plan.tile_slots)),
      .slot_pairs = Workspace<int32_t>(layout_.slot_pairs),
      .x = x,
      .x_stride = hidden,
      .x_by_token = true,
      .experts_per_token = k,
      .y = Workspace<std::byte>(layout_.activated),
      .y_stride = kernels::Bf16Stride(width)};
  if (plan.kernel == kernels::ExpertKernel::kWide) {
    // The results come later: their memory holds the values dealt until then.
    std::byte* dealt = Workspace<std::byte>(layout_.results);
    Check(kernels::LaunchDealColumns(stream(), x, num_tokens, hidden, dealt), "values of experts");
    gemm.x = dealt;
    gemm.x_dealt = gemm.y_dealt = true;
  }
  RunExperts(gemm, plan);
  gemm.rows = args.hidden;
  gemm.cols = static_cast<int>(width);
  gemm.w = expert.down.data;
  gemm.up = nullptr;
  gemm.tiles_settled = true;
  gemm.x = gemm.y;
  gemm.x_stride = gemm.y_stride;
  gemm.x_by_token = false;
  gemm.y = Workspace<std::byte>(layout_.results);
  gemm.y_stride = hidden;
  gemm.y_by_pair = true;
  gemm.y_dealt = false;
  RunExperts(gemm, plan);
  Check(kernels::LaunchCombine(
            stream(),
            {.type = type_,
             .num_tokens = num_tokens,
             .k = k,
             .hidden = args.hidden,
             .results = gemm.y,
             .weights = Workspace<float>(layout_.weights),
             .out = Activation(args.out, first * hidden),
             .norm = args.norm,
             .norm_eps = args.norm_eps,
             .normed = args.norm != nullptr ? Activation(args.normed, first * hidden) : nullptr}),
        "sum of experts");
}

void CudaOps::Moe(const MoeArgs& given) {
  MoeArgs args = given;
  if (args.first_norm != nullptr) args.x = args.normed;
  const int num_experts = static_cast<int>(args.experts.size());
  CHECK_LE(args.num_tokens, limits_.max_tokens);
  CHECK_LE(args.hidden, limits_.hidden);
  CHECK(num_experts > 0 && num_experts <= limits_.num_experts);
  CHECK_LE(args.experts_per_token,
           std::min(limits_.experts_per_token, kernels::kMaxExpertsPerTokenCuda));
  CHECK_EQ(args.router.rows, num_experts);
  CHECK(args.experts_per_token <= args.router.rows / args.num_groups * args.topk_groups);
  CHECK_LE(args.num_groups, kernels::kMaxExpertGroupsCuda);
  const MlpWeights& first = args.experts[0];
  CHECK_LE(first.gate.rows,
           limits_.max_expert_width > 0 ? limits_.max_expert_width : limits_.max_mlp_width);
  // The kernels find an expert's matrices by its number.
  const auto check_even = [&](Matrix MlpWeights::*member) {
    const Matrix& base = first.*member;
    const int64_t apart = num_experts > 1 ? args.experts[1].gate.data - first.gate.data : 0;
    for (int e = 0; e < num_experts; ++e) {
      const Matrix& matrix = args.experts[e].*member;
      CHECK(matrix.data == base.data + e * apart && matrix.type == base.type &&
            matrix.rows == base.rows && matrix.cols == base.cols)
          << "expert " << e << " is not where its number says";
    }
  };
  check_even(&MlpWeights::gate);
  check_even(&MlpWeights::up);
  check_even(&MlpWeights::down);
  const bool routed = RouteFew(args, PlanExperts(args, args.num_tokens).tile_slots);
  if (!routed && args.first_norm != nullptr) {
    RmsNorm(args.num_tokens, args.hidden, args.out, args.first_norm, args.norm_eps, args.normed);
  }
  // Before the others, since the norm at the end of a wave is of all that is added.
  if (args.shared != nullptr) Mlp(args.num_tokens, args.x, *args.shared, args.out);
  for (int token = 0; token < args.num_tokens; token += layout_.wave_tokens) {
    const int count = std::min(layout_.wave_tokens, args.num_tokens - token);
    const kernels::ExpertPlan plan = PlanExperts(args, count);
    if (!routed) Route(args, token, count, plan.tile_slots);
    RunMoeWave(args, token, count, plan);
  }
}

}  // namespace writescope::ops
