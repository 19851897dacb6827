// Matrices on the GPU: brought in parts through scratch memory, converted or quantised there. And
// the warm-up, which goes over what was loaded.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "engine/base/check.h"
#include "engine/base/status_macros.h"
#include "engine/kernels/cuda/elementwise_cuda.h"
#include "engine/kernels/cuda/weights_cuda.h"
#include "engine/kernels/quantize_int4.h"
#include "engine/ops/cuda/cuda_ops_impl.h"

namespace writescope::ops {
namespace {

kernels::ValueType SourceType(WeightType source) {
  return source == WeightType::kF32 ? kernels::ValueType::kF32 : kernels::ValueType::kBf16;
}

// Numbers of rows whose products are warmed: cuBLAS has kernels for classes of sizes, narrow where
// rows are few.
std::vector<int> WarmRows(int max_tokens) {
  std::vector<int> rows;
  for (int n = 1; n <= max_tokens; n += n < 16 ? 1 : n < 128 ? 16 : n < 1024 ? 128 : 512) {
    rows.push_back(n);
  }
  if (rows.empty() || rows.back() != max_tokens) rows.push_back(max_tokens);
  return rows;
}

// The scratch memory of warm-ups is parts of this size: what is read, what is written, a block,
// flags.
constexpr size_t kWarmPartBytes = size_t{1} << 20;

// Every kernel of the experts.
constexpr kernels::ExpertPlan kWarmPlans[] = {
    {kernels::ExpertKernel::kSimt, kernels::kSimtSlots},
    {kernels::ExpertKernel::kStream, kernels::kStreamSlotsFew},
    {kernels::ExpertKernel::kStream, kernels::kStreamSlots},
    {kernels::ExpertKernel::kRing, kernels::kRingSlotsFew},
    {kernels::ExpertKernel::kRing, kernels::kRingSlots},
    {kernels::ExpertKernel::kTile, kernels::kTileSlotsFew},
    {kernels::ExpertKernel::kTile, kernels::kTileSlots},
    {kernels::ExpertKernel::kWide, kernels::kWideSlots}};

}  // namespace

template <typename Fill>
absl::StatusOr<Matrix> CudaOps::MakeMatrix(std::byte* to, WeightType source, WeightFormat format,
                                           int64_t rows, int64_t cols, const Fill& fill) {
  if (rows < 1 || cols < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("a matrix of ", rows, " rows and ", cols, " columns"));
  }
  if (source == WeightType::kInt4) {
    return absl::InvalidArgumentError("the source of a matrix is float32 or bfloat16");
  }
  const kernels::ValueType from = SourceType(source);
  const int64_t row_bytes = cols * kernels::ValueBytes(from);
  std::byte* staging = Workspace<std::byte>(layout_.activated);
  // Whole tiles of rows.
  constexpr int64_t kTile = kernels::kInt4TileRows;
  const int64_t part_rows = layout_.scratch_bytes() / row_bytes / kTile * kTile;
  if (part_rows == 0) {
    return absl::ResourceExhaustedError(
        absl::StrCat("rows of ", row_bytes, " bytes are too long to be loaded"));
  }
  const int64_t stride = type_ == kernels::ValueType::kF32 ? cols : kernels::Bf16Stride(cols);
  for (int64_t first = 0; first < rows; first += part_rows) {
    const int64_t part = std::min(part_rows, rows - first);
    fill(first, part, staging);
    if (format == WeightFormat::kInt4) {
      Check(kernels::LaunchQuantizeInt4(stream(), from, staging, first, part, rows, cols, to),
            "quantisation");
    } else {
      Check(kernels::LaunchConvertRows(stream(), from, staging, part, cols, type_, stride,
                                       to + first * stride * kernels::ValueBytes(type_)),
            "conversion of weights");
    }
  }
  Check(cudaStreamSynchronize(stream()), "loading a matrix");
  RETURN_IF_ERROR(device_.compute().TakeError());
  const WeightType type =
      format == WeightFormat::kInt4 ? WeightType::kInt4 : WeightTypeOf(options_.compute);
  const Matrix matrix = {.data = to, .type = type, .rows = rows, .cols = cols};
  AddShape(matrix);
  return matrix;
}

void CudaOps::AddShape(const Matrix& matrix) {
  const auto known = std::find_if(shapes_.begin(), shapes_.end(), [&](const Shape& shape) {
    return shape.matrix.rows == matrix.rows && shape.matrix.cols == matrix.cols &&
           shape.matrix.type == matrix.type;
  });
  if (known == shapes_.end()) {
    shapes_.push_back({matrix, 1});
  } else {
    ++known->count;
  }
}

std::optional<Matrix> CudaOps::Join(std::span<const Matrix> parts) {
  if (parts.empty() || parts[0].type == WeightType::kInt4) return std::nullopt;
  Matrix whole = parts[0];
  const int64_t stride =
      type_ == kernels::ValueType::kF32 ? whole.cols : kernels::Bf16Stride(whole.cols);
  for (const Matrix& part : parts.subspan(1)) {
    const std::byte* end = whole.data + whole.rows * stride * kernels::ValueBytes(type_);
    if (part.data != end || part.cols != whole.cols || part.type != whole.type) return std::nullopt;
    whole.rows += part.rows;
  }
  AddShape(whole);
  return whole;
}

absl::StatusOr<Matrix> CudaOps::LoadMatrix(std::byte* to, WeightType source, WeightFormat format,
                                           int64_t rows, int64_t cols, const std::byte* from) {
  const int64_t row_bytes = cols * kernels::ValueBytes(SourceType(source));
  return MakeMatrix(to, source, format, rows, cols,
                    [&](int64_t first, int64_t part, std::byte* staging) {
                      Check(cudaMemcpyAsync(staging, from + first * row_bytes,
                                            static_cast<size_t>(part * row_bytes),
                                            cudaMemcpyHostToDevice, stream()),
                            "upload of weights");
                    });
}

absl::StatusOr<Matrix> CudaOps::RandomMatrix(std::byte* to, WeightType source, WeightFormat format,
                                             int64_t rows, int64_t cols, float sigma,
                                             uint64_t seed) {
  return MakeMatrix(to, source, format, rows, cols,
                    [&](int64_t first, int64_t part, std::byte* staging) {
                      Check(kernels::LaunchRandomWeights(stream(), SourceType(source), seed,
                                                         first * cols, part * cols, sigma, staging),
                            "random weights");
                    });
}

absl::StatusOr<const float*> CudaOps::LoadVector(std::byte* to, int64_t count, const float* from) {
  if (count < 1) return absl::InvalidArgumentError(absl::StrCat("a vector of ", count, " values"));
  Check(cudaMemcpyAsync(to, from, static_cast<size_t>(count) * sizeof(float),
                        cudaMemcpyHostToDevice, stream()),
        "upload of a vector");
  Check(cudaStreamSynchronize(stream()), "upload of a vector");
  RETURN_IF_ERROR(device_.compute().TakeError());
  return reinterpret_cast<const float*>(to);
}

// Every dense product at every class of sizes, on scratch memory: values do not matter.
void CudaOps::WarmProducts(const KvGeometry& kv, int num_heads) {
  const int64_t value_bytes = kernels::ValueBytes(type_);
  const auto scratch_holds = [&](int64_t bytes) { return bytes <= layout_.scratch_bytes(); };
  std::byte* x = Workspace<std::byte>(layout_.activated);
  for (const Shape& shape : shapes_) {
    const Matrix& w = shape.matrix;
    if (w.type == WeightType::kInt4) continue;
    for (const int rows : WarmRows(limits_.max_tokens)) {
      const int64_t x_bytes = RoundUp(rows * w.cols * value_bytes, 256);
      if (!scratch_holds(x_bytes + rows * w.rows * 4)) break;
      BlasProduct product = ProductOf(rows, x, w.cols, w, x + x_bytes, w.rows);
      Multiply(product);
      product.beta = 1;
      Multiply(product);
      if (w.rows == limits_.num_experts) {  // It may be the router.
        product.y_type = kernels::ValueType::kF32;
        product.beta = 0;
        Multiply(product);
      }
      // The two halves of a shared expert.
      product = ProductOf(rows, x, w.cols, w, x + x_bytes, w.rows);
      product.batch = 2;
      product.y_batch = rows * w.rows;
      if (scratch_holds(x_bytes + 2 * rows * w.rows * value_bytes)) Multiply(product);
      // MLA's heads.
      const int64_t head_bytes = num_heads * (x_bytes + int64_t{rows} * (w.rows + 64) * 4);
      if (!kv.value_in_key || shape.count < num_heads || !scratch_holds(head_bytes)) continue;
      product =
          ProductOf(rows, x, num_heads * w.cols, w, x + num_heads * x_bytes, num_heads * w.rows);
      product.batch = num_heads;
      product.x_batch = w.cols;
      product.y_batch = w.rows;
      Multiply(product);
      if (w.rows + 64 > kv.k_dim) continue;
      product.y_type = kernels::ValueType::kF32;
      Multiply(product);
    }
  }
}

void CudaOps::WarmLatentHeads(const KvGeometry& kv, int num_heads) {
  if (!kv.value_in_key) return;
  const auto warm = [&](const Shape& key_up, const Shape& value_up) {
    const std::vector<Matrix> keys(static_cast<size_t>(num_heads), key_up.matrix);
    const std::vector<Matrix> values(static_cast<size_t>(num_heads), value_up.matrix);
    const int rope_dim = kv.k_dim - static_cast<int>(key_up.matrix.rows);
    const LatentHeads heads = {.key_up = keys, .value_up = values, .rope_dim = rope_dim};
    attend_->WarmUpHeads(kv, heads, ProductsOf(heads));
  };
  for (const Shape& a : shapes_) {
    for (const Shape& b : shapes_) {
      if (a.count < num_heads || b.count < num_heads) continue;
      if (a.matrix.rows == b.matrix.cols && a.matrix.rows < kv.k_dim) warm(a, b);
    }
  }
}

// All kernels of the mixture of experts, on no tile of slots: they are loaded, and end at once.
void CudaOps::WarmExperts() {
  if (limits_.num_experts == 0) return;
  auto* tiles = Workspace<kernels::ExpertTile>(layout_.tiles);
  Check(cudaMemsetAsync(tiles, 0, sizeof(kernels::ExpertTile), stream()), "warm-up");
  for (const Shape& shape : shapes_) {
    if (shape.count < limits_.num_experts) continue;
    kernels::ExpertGemmArgs args = {.weights = expert_weights(shape.matrix),
                                    .rows = static_cast<int>(shape.matrix.rows),
                                    .cols = static_cast<int>(shape.matrix.cols),
                                    .w = shape.matrix.data,
                                    .tiles = tiles,
                                    .num_tiles = 1,
                                    .x_dealt = true};
    for (const std::byte* up : {static_cast<const std::byte*>(nullptr), shape.matrix.data}) {
      args.up = up;
      for (const kernels::ExpertPlan& plan : kWarmPlans) {
        const bool simt = options_.force_simt || type_ == kernels::ValueType::kF32;
        if (simt ? plan.kernel == kernels::ExpertKernel::kSimt
                 : kernels::CanRun(plan.kernel, {.weights = args.weights,
                                                 .rows = args.rows,
                                                 .cols = args.cols,
                                                 .gated = up != nullptr})) {
          RunExperts(args, plan);
        }
      }
    }
  }
  const int k = std::min(limits_.experts_per_token, limits_.num_experts);
  float* logits = Workspace<float>(layout_.logits);
  int32_t* experts = Workspace<int32_t>(layout_.experts);
  float* weights = Workspace<float>(layout_.weights);
  Check(cudaMemsetAsync(logits, 0, static_cast<size_t>(limits_.num_experts) * 4, stream()),
        "warm-up");
  Check(kernels::LaunchRoute(stream(), {.num_experts = limits_.num_experts, .experts_per_token = k},
                             1, logits, false, experts, weights),
        "warm-up of the router");
  Check(kernels::LaunchSortPairs(stream(), limits_.num_experts, k, kernels::kStreamSlotsFew,
                                 experts, Workspace<int32_t>(layout_.slot_pairs), tiles),
        "warm-up of the order of experts");
  WarmRouteFew(k);
  std::byte* scratch = Workspace<std::byte>(layout_.activated);
  for (const float* norm :
       {static_cast<const float*>(nullptr), Workspace<const float>(layout_.results)}) {
    Check(kernels::LaunchCombine(stream(), {.type = type_,
                                            .num_tokens = 1,
                                            .k = k,
                                            .hidden = limits_.hidden,
                                            .results = Workspace<std::byte>(layout_.results),
                                            .weights = weights,
                                            .out = scratch,
                                            .norm = norm,
                                            .norm_eps = 1,
                                            .normed = scratch}),
          "warm-up of the sum of experts");
  }
}

// The router of few tokens, on scratch memory: values do not matter.
void CudaOps::WarmRouteFew(int k) {
  if (options_.force_simt || type_ != kernels::ValueType::kBf16) return;
  std::byte* scratch = Workspace<std::byte>(layout_.activated);
  const int stride = static_cast<int>(kernels::Bf16Stride(limits_.hidden));
  for (const int tokens : {1, 9}) {
    const int64_t rows_bytes = RoundUp(int64_t{tokens} * stride * 4, 256);
    const kernels::RouteFewArgs args = {
        .config = {.num_experts = limits_.num_experts, .experts_per_token = k},
        .num_tokens = tokens,
        .hidden = limits_.hidden,
        .x = scratch,
        .norm = reinterpret_cast<const float*>(scratch + rows_bytes),
        .norm_eps = 1,
        .normed = scratch + 2 * rows_bytes,
        .router = scratch + 3 * rows_bytes,
        .router_stride = stride,
        .tile_slots = kernels::kStreamSlotsFew,
        .num_tiles = 1,
        .logits = Workspace<float>(layout_.logits),
        .arrivals = Workspace<uint32_t>(layout_.arrivals),
        .experts = Workspace<int32_t>(layout_.experts),
        .weights = Workspace<float>(layout_.weights),
        .slot_pairs = Workspace<int32_t>(layout_.slot_pairs),
        .tiles = Workspace<kernels::ExpertTile>(layout_.tiles)};
    const int64_t needed = 3 * rows_bytes + int64_t{limits_.num_experts} * stride * 2;
    if (tokens > layout_.wave_tokens || needed > layout_.scratch_bytes()) continue;
    if (kernels::RoutesFew(args)) Check(kernels::LaunchRouteFew(stream(), args), "warm-up");
  }
}

absl::Status CudaOps::WarmUp(const KvGeometry& kv, int num_heads) {
  WarmProducts(kv, num_heads);
  WarmLatentHeads(kv, num_heads);
  WarmExperts();
  WarmRowKernels();
  WarmPrepare(kv);
  attend_->WarmUp(kv, num_heads);
  Check(cudaStreamSynchronize(stream()), "warm-up");
  return device_.compute().TakeError();
}

void CudaOps::WarmRowKernels() {
  std::byte* scratch = Workspace<std::byte>(layout_.activated);
  constexpr size_t kPart = kWarmPartBytes;
  Check(cudaMemsetAsync(scratch, 0, 4 * kPart, stream()), "warm-up");
  const float* floats = reinterpret_cast<const float*>(scratch);
  float* out = reinterpret_cast<float*>(scratch + kPart);
  for (const int dim : {64, 63}) {  // Whole vectors, and not
    const int bytes = dim * kernels::ValueBytes(type_);
    Check(kernels::LaunchRmsNorm(stream(), type_, 1, dim, scratch, floats, 1, out), "warm-up");
    Check(kernels::LaunchSwiGlu(stream(), type_, dim, scratch, scratch, out), "warm-up");
    Check(kernels::LaunchMaxOfRows(stream(), type_, 1, dim, scratch,
                                   reinterpret_cast<kernels::RowMax*>(out)),
          "warm-up");
    Check(kernels::LaunchGatherRows(stream(), 1, bytes / 2 * 2, bytes / 2 * 2,
                                    reinterpret_cast<const int32_t*>(scratch), scratch, out),
          "warm-up");
  }
  Check(kernels::LaunchToFloats(stream(), type_, 1, scratch, out), "warm-up");
  Check(
      kernels::LaunchPublish(stream(), {.type = type_,
                                        .count = 8,
                                        .from = floats,
                                        .to = out,
                                        .failed = device_.compute().failed_word(),
                                        .counter = device_.compute().counter_word(),
                                        .ready = reinterpret_cast<uint64_t*>(scratch + 3 * kPart)}),
      "warm-up");
}

void CudaOps::WarmPrepare(const KvGeometry& kv) {
  std::byte* scratch = Workspace<std::byte>(layout_.activated);
  const float* floats = reinterpret_cast<const float*>(scratch);
  float* out = reinterpret_cast<float*>(scratch + kWarmPartBytes);
  const KvTarget target = {.block = scratch + 2 * kWarmPartBytes, .slot = 0};
  const int64_t position = 0;
  const kernels::TokenPlace* place = StagePlaces({&position, 1}, {&target, 1});
  const KvGeometry small = {.num_kv_heads = 1,
                            .k_dim = 32,
                            .v_dim = 32,
                            .value_in_key = kv.value_in_key,
                            .dtype = kv.dtype};
  const kernels::RopeArgs rope = {.inv_freq = floats, .dim = 8};
  if (kv.value_in_key) {
    Check(kernels::LaunchMlaPrepare(stream(), {.type = type_,
                                               .num_tokens = 1,
                                               .num_heads = 1,
                                               .nope_dim = 8,
                                               .latent_dim = 8,
                                               .kv = small,
                                               .q = scratch,
                                               .kv_a = scratch,
                                               .kv_norm = floats,
                                               .norm_eps = 1,
                                               .rope = rope,
                                               .places = place,
                                               .q_out = out}),
          "warm-up");
  } else {
    Check(kernels::LaunchGqaPrepare(stream(), {.type = type_,
                                               .num_tokens = 1,
                                               .num_heads = 1,
                                               .head_dim = 32,
                                               .kv = small,
                                               .q = scratch,
                                               .k = scratch,
                                               .v = scratch,
                                               .rope = rope,
                                               .places = place,
                                               .q_out = out}),
          "warm-up");
  }
}

}  // namespace writescope::ops
