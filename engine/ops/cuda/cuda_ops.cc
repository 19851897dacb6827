#include "engine/ops/cuda/cuda_ops.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/base/check.h"
#include "engine/base/status_macros.h"
#include "engine/kernels/cuda/attend_launch.h"
#include "engine/kernels/cuda/elementwise_cuda.h"
#include "engine/kernels/quantize_int4.h"
#include "engine/ops/cuda/cuda_ops_impl.h"

namespace writescope::ops {
namespace {

constexpr int kMaxWaveTokens = 2048;
constexpr int64_t kScratchBytesMin = 32 * kMiB;
// The graph of a layer: ten to some fifteen kernels, two of them with 4 KB of parameters. Measured
// on an H200: 94 KiB.
constexpr int64_t kRecordingLayerBytes = 128 * kKiB;
// Arguments of one call lie in page-locked memory of kMaxArgumentBytes.
constexpr int kMaxTokens =
    static_cast<int>(device::kMaxArgumentBytes / static_cast<int64_t>(sizeof(kernels::TokenPlace)));

template <ComputeType kCompute>
int64_t MatrixBytes(WeightType, WeightFormat format, int64_t rows, int64_t cols) {
  if (format == WeightFormat::kInt4) return RoundUp(kernels::Int4Bytes(rows, cols), 64);
  if (kCompute == ComputeType::kF32) return RoundUp(rows * cols * 4, 64);
  return RoundUp(rows * kernels::Bf16Stride(cols) * 2, 64);
}

template <ComputeType kCompute>
int64_t WorkspaceBytes(const OpsLimits& limits) {
  return CudaWorkspace::For(limits, kCompute).num_bytes + CudaAttend::WorkspaceBytes(limits) +
         CudaOps::StagedBytes();
}

template <ComputeType kCompute>
OpsFootprint Footprint() {
  return {.activation_bytes = ActivationBytes(kCompute),
          .matrix_bytes = &MatrixBytes<kCompute>,
          .workspace_bytes = &WorkspaceBytes<kCompute>,
          .recording_layer_bytes = kRecordingLayerBytes};
}

}  // namespace

absl::Status CheckCudaOpsLimits(const OpsLimits& limits) {
  if (limits.max_tokens < 1 || limits.hidden < 1 || limits.max_head_dim < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("operations for at most ", limits.max_tokens, " tokens of ", limits.hidden,
                     " values with heads of ", limits.max_head_dim, ": each must be at least 1"));
  }
  if (limits.max_tokens > kMaxTokens) {
    return absl::InvalidArgumentError(absl::StrCat("steps of ", limits.max_tokens,
                                                   " tokens; the GPU takes at most ", kMaxTokens));
  }
  if (limits.num_experts > kernels::kMaxExpertsCuda) {
    return absl::UnimplementedError(absl::StrCat(
        limits.num_experts, " experts; the GPU's router takes at most ", kernels::kMaxExpertsCuda));
  }
  if (limits.experts_per_token > kernels::kMaxExpertsPerTokenCuda) {
    return absl::UnimplementedError(absl::StrCat(
        limits.experts_per_token, " experts for a token; the GPU's router takes at most ",
        kernels::kMaxExpertsPerTokenCuda));
  }
  if (limits.num_expert_groups > kernels::kMaxExpertGroupsCuda) {
    return absl::UnimplementedError(absl::StrCat(
        limits.num_expert_groups, " groups of experts; the GPU's router takes at most ",
        kernels::kMaxExpertGroupsCuda));
  }
  if (limits.max_head_dim > kernels::kSimtMaxDim) {
    return absl::UnimplementedError(absl::StrCat("heads of ", limits.max_head_dim,
                                                 " values; attention on the GPU takes at most ",
                                                 kernels::kSimtMaxDim));
  }
  return absl::OkStatus();
}

CudaWorkspace CudaWorkspace::For(const OpsLimits& limits, ComputeType compute) {
  CudaWorkspace layout;
  const auto take = [&layout](int64_t size_bytes) {
    const int64_t at = layout.num_bytes;
    layout.num_bytes += RoundUp(size_bytes, 256);
    return at;
  };
  const int64_t value_bytes = ActivationBytes(compute);
  const int64_t tokens = std::min(limits.max_tokens, kMaxWaveTokens);
  const int64_t pairs = tokens * limits.experts_per_token;
  const int64_t expert_width =
      limits.max_expert_width > 0 ? limits.max_expert_width : limits.max_mlp_width;
  layout.wave_tokens = static_cast<int>(tokens);
  layout.blas = take(Cublas::kWorkspaceBytes);
  layout.logits = take(tokens * limits.num_experts * 4);
  layout.experts = take(pairs * 4);
  layout.weights = take(pairs * 4);
  layout.slot_pairs = take(pairs * 4);
  layout.tiles = take(kernels::MaxExpertTiles(pairs, limits.num_experts, kernels::kStreamSlotsFew) *
                      static_cast<int64_t>(sizeof(kernels::ExpertTile)));
  layout.arrivals = take(4);
  layout.activated = take(value_bytes * std::max(pairs * kernels::Bf16Stride(expert_width),
                                                 2 * tokens * limits.max_mlp_width));
  layout.results = take(value_bytes * pairs * limits.hidden);
  if (layout.scratch_bytes() < kScratchBytesMin) take(kScratchBytesMin - layout.scratch_bytes());
  return layout;
}

OpsFootprint CudaOpsFootprint(ComputeType compute) {
  return compute == ComputeType::kF32 ? Footprint<ComputeType::kF32>()
                                      : Footprint<ComputeType::kBf16>();
}

absl::StatusOr<std::unique_ptr<Ops>> CreateCudaOps(device::CudaDevice& device,
                                                   const OpsLimits& limits,
                                                   const CudaOpsOptions& options) {
  RETURN_IF_ERROR(CheckCudaOpsLimits(limits));
  CudaOpsOptions used = options;
  used.force_simt = options.force_simt || device.info().compute_major < 8;
  const CudaWorkspace layout = CudaWorkspace::For(limits, options.compute);
  ASSIGN_OR_RETURN(device::Buffer workspace,
                   device.AllocateDevice(layout.num_bytes, "workspace of operations"));
  ASSIGN_OR_RETURN(device::Buffer staged,
                   device.AllocateDevice(CudaOps::StagedBytes(), "inputs of a step"));
  ASSIGN_OR_RETURN(std::unique_ptr<Cublas> cublas,
                   Cublas::Create(device.compute().stream(), workspace.data() + layout.blas));
  ASSIGN_OR_RETURN(std::unique_ptr<CudaAttend> attend,
                   CudaAttend::Create(device, limits, used.compute, used.force_simt));
  return std::make_unique<CudaOps>(device, limits, used, std::move(workspace), std::move(staged),
                                   std::move(cublas), std::move(attend));
}

CudaOps::CudaOps(device::CudaDevice& device, const OpsLimits& limits, const CudaOpsOptions& options,
                 device::Buffer workspace, device::Buffer staged, std::unique_ptr<Cublas> cublas,
                 std::unique_ptr<CudaAttend> attend)
    : device_(device),
      limits_(limits),
      options_(options),
      type_(ValueTypeOf(options.compute)),
      layout_(CudaWorkspace::For(limits, options.compute)),
      workspace_(std::move(workspace)),
      cublas_(std::move(cublas)),
      attend_(std::move(attend)),
      staged_(std::move(staged)) {}

void CudaOps::CheckTokens(std::span<const TokenId> ids, const Matrix& table) const {
  for (const TokenId id : ids) {
    CHECK(id >= 0 && id < table.rows) << "token " << id << " of a vocabulary of " << table.rows;
  }
  CHECK(table.type == WeightTypeOf(options_.compute));
}

void CudaOps::GatherEmbeddings(int count, const int32_t* ids, const Matrix& table, void* out) {
  const BlasProduct layout = ProductOf(0, nullptr, 0, table, nullptr, 0);
  const int value_bytes = kernels::ValueBytes(type_);
  Check(kernels::LaunchGatherRows(stream(), count, table.cols * value_bytes,
                                  layout.w_stride * value_bytes, ids, table.data, out),
        "embedding");
}

void CudaOps::Embed(std::span<const TokenId> ids, const Matrix& table, void* out) {
  CheckTokens(ids, table);
  GatherEmbeddings(static_cast<int>(ids.size()), Stage(ids), table, out);
}

void CudaOps::RmsNorm(int num_rows, int dim, const void* x, const float* weight, float eps,
                      void* out) {
  Check(kernels::LaunchRmsNorm(stream(), type_, num_rows, dim, x, weight, eps, out), "norm");
}

void CudaOps::ResetAttention(int num_rows, int num_heads, int, const AttendState& state) {
  attend_->Reset(num_rows, num_heads, state);
}

void CudaOps::Attend(const AttendArgs& args) {
  if (args.state.heads == nullptr) return attend_->Attend(args);
  attend_->AttendHeads(args, ProductsOf(*args.state.heads));
}

int CudaOps::LatentHeadsMinRows(const KvGeometry& kv, const LatentHeads& heads) const {
  // Of V2-Lite, where a latent's products for its heads are as much work as those that 200 rows
  // save.
  constexpr int kMinRows = 256;
  const bool takes_them = attend_->TakesHeads(kv, heads) && SpacingOf(heads.key_up).has_value() &&
                          SpacingOf(heads.value_up).has_value();
  return takes_them ? kMinRows : std::numeric_limits<int>::max();
}

LatentProducts CudaOps::ProductsOf(const LatentHeads& heads) {
  return [this, &heads](const LatentPart& part) {
    const int num_heads = static_cast<int>(heads.key_up.size());
    const Matrix& key_up = heads.key_up[0];
    BlasProduct keys = ProductOf(part.num_tokens, part.latents, key_up.rows, key_up, part.keys, 0);
    keys.rows = key_up.cols;
    keys.cols = key_up.rows;
    keys.w_is_turned = true;
    keys.y_stride = num_heads * key_up.cols;
    keys.batch = num_heads;
    keys.w_batch = *SpacingOf(heads.key_up);
    keys.y_batch = key_up.cols;
    // As the products want them: a row has a dim of all tokens.
    const Matrix& value_up = heads.value_up[0];
    BlasProduct values = ProductOf(0, nullptr, 0, value_up, part.values, part.num_tokens);
    std::swap(values.x, values.w);
    std::swap(values.x_stride, values.w_stride);
    values.num_rows = value_up.rows;
    values.rows = part.num_tokens;
    values.w = part.latents;
    values.w_stride = value_up.cols;
    values.batch = num_heads;
    values.x_batch = *SpacingOf(heads.value_up);
    values.y_batch = value_up.rows * part.num_tokens;
    for (const BlasProduct& product : {keys, values}) {
      device_.compute().Check(cublas_->Multiply(product));
    }
  };
}

void CudaOps::MergeAttention(const MergeArgs& args) { attend_->Merge(args); }

void CudaOps::GatherRows(std::span<const int> rows, int dim, const void* x, void* out) {
  const int64_t row_bytes = int64_t{dim} * kernels::ValueBytes(type_);
  Check(kernels::LaunchGatherRows(stream(), static_cast<int>(rows.size()), row_bytes, row_bytes,
                                  Stage(rows), x, out),
        "gather of rows");
}

void CudaOps::MaxOfRows(int num_rows, int dim, const void* x, kernels::RowMax* to) {
  Check(kernels::LaunchMaxOfRows(stream(), type_, num_rows, dim, x, to), "largest of rows");
}

void CudaOps::DownloadFloats(const void* from, int64_t count, float* to) {
  Check(kernels::LaunchToFloats(stream(), type_, count, from, to), "download");
}

void CudaOps::PublishQueries(const PublishArgs& args) {
  static_assert(std::atomic<uint64_t>::is_always_lock_free);
  device::CudaQueue& queue = device_.compute();
  // In the order in which they come.
  uint64_t* const began_ns = queue.AddStamp(args.began_s);
  uint64_t* const ended_ns = queue.AddStamp(args.ended_s);
  Check(kernels::LaunchPublish(stream(), {.type = type_,
                                          .count = args.num_values,
                                          .from = args.q,
                                          .to = args.to,
                                          .failed = queue.failed_word(),
                                          .counter = queue.counter_word(),
                                          .ready = reinterpret_cast<uint64_t*>(args.ready),
                                          .value = args.value,
                                          .began_ns = began_ns,
                                          .ended_ns = ended_ns}),
        "queries for the CPU");
}

}  // namespace writescope::ops
