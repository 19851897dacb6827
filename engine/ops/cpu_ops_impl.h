// The CPU's Ops, for the cpu_ops*.cc files of this folder only.
//
// Engine thread: the public calls; each copies what it needs and launches a closure. Compute queue:
// the closures, one after another, so they share the workspace and the scratch without locks.
// Inside a closure work is spread by ForItems. Which thread takes an item never changes a result.
#pragma once

#include <limits>
#include <optional>
#include <vector>

#include "engine/kernels/gemm.h"
#include "engine/kernels/router.h"
#include "engine/ops/cpu_ops.h"
#include "engine/ops/staged_step.h"

namespace writescope::ops {

// Where each array of the workspace lies; floats from its start.
struct CpuWorkspace {
  int64_t num_slots = 0;  // Rows of a MoE wave: (token, expert) pairs that are computed together.
  int64_t probabilities = 0;  // [max_tokens, num_experts]
  int64_t gathered = 0;       // [num_slots, hidden]
  int64_t activated = 0;      // [num_slots, max_mlp_width]
  int64_t results = 0;        // [num_slots, hidden]
  int64_t num_floats = 0;

  static CpuWorkspace For(const OpsLimits& limits);
};

// Rows of x and rows of W that one item of a matrix product covers.
inline constexpr int64_t kItemRows = 256;
inline constexpr int64_t kItemCols = kernels::kGemmPanelRows;

struct AttendCall;
struct AttendItem;

class CpuOps final : public Ops {
 public:
  CpuOps(device::CpuDevice& device, const OpsLimits& limits, device::Buffer workspace);

  device::Device& device() override { return device_; }
  OpsFootprint footprint() const override { return CpuOpsFootprint(); }
  absl::StatusOr<Matrix> LoadMatrix(std::byte* to, WeightType source, WeightFormat format,
                                    int64_t rows, int64_t cols, const std::byte* from) override;
  absl::StatusOr<Matrix> RandomMatrix(std::byte* to, WeightType source, WeightFormat format,
                                      int64_t rows, int64_t cols, float sigma,
                                      uint64_t seed) override;
  absl::StatusOr<const float*> LoadVector(std::byte* to, int64_t count, const float* from) override;
  absl::Status WarmUp(const KvGeometry&, int) override { return absl::OkStatus(); }
  std::optional<Matrix> Join(std::span<const Matrix>) override { return std::nullopt; }
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
  int LatentHeadsMinRows(const KvGeometry&, const LatentHeads&) const override {
    return std::numeric_limits<int>::max();
  }
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
  // What a thread of the team needs for itself; made once.
  struct Scratch {
    std::vector<float> gemm;   // kernels::kGemmScratchFloats
    std::vector<float> panel;  // [kItemRows, kItemCols]
    std::vector<float> row;    // Angles and a key of one token, or a value
    // Rows of one call of the attention kernel.
    std::vector<const float*> q;
    std::vector<float*> o, m, l;
    std::vector<int64_t> visible;
  };
  // Products of one gated MLP for some rows.
  struct MlpJob {
    const MlpWeights* weights = nullptr;
    const float* x = nullptr;  // [num_rows, hidden]
    int64_t num_rows = 0;
    float* activated = nullptr;  // [num_rows, width]
    float* out = nullptr;        // [num_rows, hidden]
    bool accumulate = false;
  };
  // One matrix product; rows of x and y are strided.
  struct Product {
    int64_t num_rows = 0;
    const float* x = nullptr;
    int64_t x_stride = 0;
    Matrix w;
    float* y = nullptr;
    int64_t y_stride = 0;
    bool accumulate = false;
    float scale = 1;  // Multiplies y, after.
  };
  // A (token, expert) pair.
  struct Slot {
    int token;
    float weight;
  };
  struct MoeCall {
    MoeArgs args;
    std::vector<MlpWeights> experts;
    std::optional<MlpWeights> shared;
  };

  float* Workspace(int64_t offset) const {
    return reinterpret_cast<float*>(workspace_.data()) + offset;
  }
  // body(item, thread) for every item; by this thread alone when the whole is short.
  template <typename Body>
  void ForItems(int64_t count, double work_us, const Body& body);

  // The rest runs on the compute queue.
  void RunProducts(std::span<const Product> products);
  void RunMlpJobs(std::span<const MlpJob> jobs);
  void RunMoe(const MoeCall& call);
  void RouteAll(const MoeCall& call);
  void RunMoeWave(const MoeCall& call, std::span<const MlpJob> jobs, std::span<const Slot> slots);
  void RunGqaPrepare(const GqaPrepareArgs& args);
  void RunMlaPrepare(const MlaPrepareArgs& args);
  // Positions and targets of a prepare call.
  template <typename Args>
  void FillPlaces(const Args& args, std::vector<int64_t>* positions,
                  std::vector<KvTarget>* targets);
  void RunAttend(const AttendCall& call);
  void RunAttendItem(const AttendCall& call, const AttendItem& item, Scratch& scratch);
  void RunMerge(const MergeArgs& args);

  device::CpuDevice& device_;
  const OpsLimits limits_;
  const CpuWorkspace layout_;
  device::Buffer workspace_;
  std::vector<Scratch> scratch_;  // By thread of the team
  std::vector<int32_t> chosen_;   // [max_tokens, experts_per_token]
  std::vector<float> weights_;    // [max_tokens, experts_per_token]
  StagedStep staged_[kStagedSteps];
};

// Below this much work waking the team costs more than it saves: a sleeping thread takes 5 to 10 us
// to be there, and the loop ends with its last.
inline constexpr double kSerialUs = 20;
// What one core does, for deciding that; the order of magnitude is enough.
inline constexpr double kBytesPerUs = 1e4;
inline constexpr double kFlopsPerUs = 5e4;

template <typename Body>
void CpuOps::ForItems(int64_t count, double work_us, const Body& body) {
  if (work_us < kSerialUs || count == 1) {
    for (int64_t i = 0; i < count; ++i) body(i, 0);
    return;
  }
  device_.team().Run(count, body);
}

}  // namespace writescope::ops
