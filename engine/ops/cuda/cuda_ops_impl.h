// The GPU's Ops, for the cuda_ops*.cc files of this folder only.
//
// Every call launches on the compute stream and returns; errors of launches go to the queue, whose
// TakeError tells them. Nothing is allocated after Create: calls share one workspace, in the order
// of the stream.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "engine/base/check.h"
#include "engine/kernels/cuda/expert_gemm.h"
#include "engine/kernels/cuda/prepare_cuda.h"
#include "engine/ops/cuda/cublas.h"
#include "engine/ops/cuda/cuda_attend.h"
#include "engine/ops/cuda/cuda_ops.h"
#include "engine/ops/staged_step.h"

namespace writescope::ops {

inline kernels::ValueType ValueTypeOf(ComputeType compute) {
  return compute == ComputeType::kF32 ? kernels::ValueType::kF32 : kernels::ValueType::kBf16;
}
// The type of matrices that are not quantised.
inline WeightType WeightTypeOf(ComputeType compute) {
  return compute == ComputeType::kF32 ? WeightType::kF32 : WeightType::kBf16;
}

// Where each array of the workspace lies; bytes from its start.
struct CudaWorkspace {
  // Gated MLPs and mixtures of experts take this many tokens at a time: enough to fill the GPU, and
  // it bounds the arrays below.
  int wave_tokens = 0;
  int64_t blas = 0;
  int64_t logits = 0;      // float [wave_tokens, num_experts]
  int64_t experts = 0;     // int32 [wave_tokens, experts_per_token]
  int64_t weights = 0;     // float [wave_tokens, experts_per_token]
  int64_t slot_pairs = 0;  // int32 [wave_tokens * experts_per_token]
  int64_t tiles = 0;       // kernels::ExpertTile
  int64_t arrivals = 0;    // A counter of thread blocks; zero between launches
  // Activations: [wave_tokens * experts_per_token, expert width], or twice [wave_tokens, width].
  int64_t activated = 0;
  int64_t results = 0;  // Activations [wave_tokens, experts_per_token, hidden]
  int64_t num_bytes = 0;

  static CudaWorkspace For(const OpsLimits& limits, ComputeType compute);
  // `activated` and `results` together are scratch while loading and warming up.
  int64_t scratch_bytes() const { return num_bytes - activated; }
};

class CudaOps final : public Ops {
 public:
  CudaOps(device::CudaDevice& device, const OpsLimits& limits, const CudaOpsOptions& options,
          device::Buffer workspace, device::Buffer staged, std::unique_ptr<Cublas> cublas,
          std::unique_ptr<CudaAttend> attend);
  // Of device memory, for the inputs of all staged steps.
  static int64_t StagedBytes();

  device::Device& device() override { return device_; }
  OpsFootprint footprint() const override { return CudaOpsFootprint(options_.compute); }
  absl::StatusOr<Matrix> LoadMatrix(std::byte* to, WeightType source, WeightFormat format,
                                    int64_t rows, int64_t cols, const std::byte* from) override;
  absl::StatusOr<Matrix> RandomMatrix(std::byte* to, WeightType source, WeightFormat format,
                                      int64_t rows, int64_t cols, float sigma,
                                      uint64_t seed) override;
  std::optional<Matrix> Join(std::span<const Matrix> parts) override;
  absl::StatusOr<const float*> LoadVector(std::byte* to, int64_t count, const float* from) override;
  absl::Status WarmUp(const KvGeometry& kv, int num_heads) override;
  void Embed(std::span<const TokenId> ids, const Matrix& table, void* out) override;
  void RmsNorm(int num_rows, int dim, const void* x, const float* weight, float eps,
               void* out) override;
  void Linear(int num_rows, const void* x, const Matrix& w, void* out, bool accumulate) override;
  void GqaPrepare(const GqaPrepareArgs& args) override;
  void MlaPrepare(const MlaPrepareArgs& args) override;
  void MlaOutput(int num_tokens, std::span<const Matrix> value_up, const void* latent,
                 void* out) override;
  void ResetAttention(int num_rows, int num_heads, int v_dim, const AttendState& state) override;
  void Attend(const AttendArgs& args) override;
  int LatentHeadsMinRows(const KvGeometry& kv, const LatentHeads& heads) const override;
  void MergeAttention(const MergeArgs& args) override;
  bool StageStep(const StepInputs& inputs) override;
  void EmbedStaged(int step, const Matrix& table, void* out) override;
  void AttendStaged(const StagedAttendArgs& args) override;
  absl::Status BeginRecording() override;
  absl::StatusOr<std::unique_ptr<Recording>> EndRecording() override;
  void Replay(const Recording& recording) override;
  void Mlp(int num_rows, const void* x, const MlpWeights& w, void* out) override;
  void Moe(const MoeArgs& args) override;
  void GatherRows(std::span<const int> rows, int dim, const void* x, void* out) override;
  void MaxOfRows(int num_rows, int dim, const void* x, kernels::RowMax* to) override;
  void DownloadFloats(const void* from, int64_t count, float* to) override;
  void PublishQueries(const PublishArgs& args) override;

 private:
  // Fills a matrix from staged rows: fill(first_row, rows, staging) brings rows of the source type.
  template <typename Fill>
  absl::StatusOr<Matrix> MakeMatrix(std::byte* to, WeightType source, WeightFormat format,
                                    int64_t rows, int64_t cols, const Fill& fill);
  kernels::ExpertWeights expert_weights(const Matrix& w) const;
  // A product with matrix `w`; the caller sets the rest.
  BlasProduct ProductOf(int64_t num_rows, const void* x, int64_t x_stride, const Matrix& w, void* y,
                        int64_t y_stride) const;
  void Multiply(const BlasProduct& product);
  // Values from each matrix to the next, where they lie evenly.
  std::optional<int64_t> SpacingOf(std::span<const Matrix> matrices) const;
  // One product for each head: x and y of head h begin h * x_head and h * y_head values further.
  void MultiplyHeads(std::span<const Matrix> heads, BlasProduct product, int64_t x_head,
                     int64_t y_head);
  // Parts of Moe; see the bodies. A wave is tokens [first, first + num_tokens).
  void Route(const MoeArgs& args, int first, int num_tokens, int tile_slots);
  bool RouteFew(const MoeArgs& args, int tile_slots);
  void RunMoeWave(const MoeArgs& args, int first, int num_tokens, const kernels::ExpertPlan& plan);
  void RunExperts(const kernels::ExpertGemmArgs& args, const kernels::ExpertPlan& plan);
  kernels::ExpertPlan PlanExperts(const MoeArgs& args, int num_tokens) const;
  void WarmProducts(const KvGeometry& kv, int num_heads);
  void WarmLatentHeads(const KvGeometry& kv, int num_heads);
  LatentProducts ProductsOf(const LatentHeads& heads);
  void WarmExperts();
  void WarmRouteFew(int k);
  // The kernels of the small operations, on rows of zeros in scratch memory; the ids that they read
  // are zeros, too. WarmRowKernels clears it.
  void WarmRowKernels();
  void WarmPrepare(const KvGeometry& kv);

  void CheckTokens(std::span<const TokenId> ids, const Matrix& table) const;
  void GatherEmbeddings(int count, const int32_t* ids, const Matrix& table, void* out);
  // Remembers a matrix for WarmUp.
  void AddShape(const Matrix& matrix);
  static void FillPlaces(std::span<const int64_t> positions, std::span<const KvTarget> targets,
                         kernels::TokenPlace* places);
  // Of a prepare call: staged, or in memory that kernels read.
  template <typename Args>
  const kernels::TokenPlace* PlacesOf(const Args& args);
  const kernels::TokenPlace* StagePlaces(std::span<const int64_t> positions,
                                         std::span<const KvTarget> targets);
  template <typename T>
  const T* Stage(std::span<const T> values);

  cudaStream_t stream() const { return device_.compute().stream(); }
  void Check(cudaError_t error, const char* what) { device_.compute().Check(error, what); }
  template <typename T>
  T* Workspace(int64_t offset) const {
    return reinterpret_cast<T*>(workspace_.data() + offset);
  }
  std::byte* Activation(const void* base, int64_t index) const {
    return static_cast<std::byte*>(const_cast<void*>(base)) + index * kernels::ValueBytes(type_);
  }

  device::CudaDevice& device_;
  const OpsLimits limits_;
  const CudaOpsOptions options_;
  const kernels::ValueType type_;
  const CudaWorkspace layout_;
  device::Buffer workspace_;
  std::unique_ptr<Cublas> cublas_;
  std::unique_ptr<CudaAttend> attend_;
  // What the host keeps of a staged step.
  struct Staged {
    StagedStep step;
    bool is_planned = false;
  };
  // Of the step's inputs, on the device.
  std::byte* StagedInputs(int step) const;
  Staged staged_steps_[kStagedSteps];
  device::Buffer staged_;  // Their inputs
  // One matrix of each shape, for WarmUp, and how many there are.
  struct Shape {
    Matrix matrix;
    int64_t count = 0;
  };
  std::vector<Shape> shapes_;
};

template <typename Args>
const kernels::TokenPlace* CudaOps::PlacesOf(const Args& args) {
  if (args.staged_layer < 0) {
    CHECK_EQ(static_cast<int>(args.targets.size()), args.num_tokens);
    return StagePlaces(args.positions, args.targets);
  }
  CHECK_LE(args.staged_first_row + args.num_tokens,
           staged_steps_[args.staged_step].step.num_rows());
  return reinterpret_cast<const kernels::TokenPlace*>(StagedInputs(args.staged_step)) +
         args.staged_first_row;
}

template <typename T>
const T* CudaOps::Stage(std::span<const T> values) {
  const int64_t size_bytes = static_cast<int64_t>(values.size_bytes());
  T* staged = reinterpret_cast<T*>(device_.compute().StageArguments(size_bytes));
  std::copy(values.begin(), values.end(), staged);
  return staged;
}

}  // namespace writescope::ops
