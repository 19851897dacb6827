// Staged steps on the GPU. A step's inputs go to one block of device memory by one launch; kernels
// find them there, at places that depend on the number of rows only, so that the step's launches
// can be kept as a graph and launched at once: hundreds of them take the host longer than the GPU.
#include <algorithm>
#include <cstring>
#include <utility>

#include "engine/base/check.h"
#include "engine/base/status_macros.h"
#include "engine/kernels/cuda/attend_launch.h"
#include "engine/kernels/cuda/elementwise_cuda.h"
#include "engine/ops/cuda/cuda_ops_impl.h"

namespace writescope::ops {
namespace {

// The step's places, ids and plan, in this order, each aligned.
constexpr int64_t kAlignment = 32;
int64_t IdsAt(int64_t rows) { return rows * int64_t{sizeof(kernels::TokenPlace)}; }
int64_t PlanAt(int64_t rows) {
  return RoundUp(IdsAt(rows) + rows * int64_t{sizeof(TokenId)}, kAlignment);
}
static_assert(sizeof(kernels::TokenPlace) % kAlignment == 0);
static_assert(sizeof(kernels::SliceSizes) % 16 == 0);

class GraphRecording final : public Recording {
 public:
  explicit GraphRecording(std::unique_ptr<device::CapturedWork> work) : work_(std::move(work)) {}
  cudaGraphExec_t graph() const { return work_->graph(); }

 private:
  std::unique_ptr<device::CapturedWork> work_;
};

// Kernels read this much of arrays before they know how much there is.
int64_t BytesOfStep() {
  return RoundUp(device::kMaxArgumentBytes + kernels::kInlineBytes, kAlignment);
}

}  // namespace

int64_t CudaOps::StagedBytes() { return kStagedSteps * BytesOfStep(); }

std::byte* CudaOps::StagedInputs(int step) const { return staged_.data() + step * BytesOfStep(); }

bool CudaOps::StageStep(const StepInputs& inputs) {
  StagedStep& step = staged_steps_[inputs.step].step;
  step.Assign(inputs);
  const int64_t rows = step.num_rows();
  const int64_t plan_at = PlanAt(rows);
  const int64_t arrays_at = plan_at + int64_t{sizeof(kernels::SliceSizes)};
  CHECK_LE(arrays_at, device::kMaxArgumentBytes) << rows << " rows of a step";
  std::optional<StagedPlan> plan;
  if (!inputs.spans.empty()) {
    plan = attend_->Stage(step.AttendArgsOf(0, nullptr, {}), device::kMaxArgumentBytes - arrays_at);
  }
  staged_steps_[inputs.step].is_planned = plan.has_value();
  const int64_t size_bytes =
      plan.has_value() ? arrays_at + static_cast<int64_t>(plan->arrays.size()) : plan_at;
  std::byte* staged = device_.compute().StageArguments(size_bytes);
  FillPlaces(step.positions(), step.targets(), reinterpret_cast<kernels::TokenPlace*>(staged));
  std::memcpy(staged + IdsAt(rows), step.tokens().data(), step.tokens().size_bytes());
  if (plan.has_value()) {
    std::memcpy(staged + plan_at, &plan->sizes, sizeof(plan->sizes));
    std::memcpy(staged + arrays_at, plan->arrays.data(), plan->arrays.size());
  }
  Check(kernels::LaunchStageArrays(stream(), staged, StagedInputs(inputs.step), size_bytes),
        "inputs of a step");
  return inputs.spans.empty() || plan.has_value();
}

void CudaOps::EmbedStaged(int step, const Matrix& table, void* out) {
  const StagedStep& staged = staged_steps_[step].step;
  CheckTokens(staged.tokens(), table);
  GatherEmbeddings(staged.num_rows(),
                   reinterpret_cast<const int32_t*>(StagedInputs(step) + IdsAt(staged.num_rows())),
                   table, out);
}

void CudaOps::AttendStaged(const StagedAttendArgs& args) {
  StagedStep& step = staged_steps_[args.step].step;
  if (!staged_steps_[args.step].is_planned) {
    attend_->Reset(step.num_rows(), step.num_heads(), args.state);
    attend_->Attend(step.AttendArgsOf(args.layer, args.q, args.state));
    attend_->Merge({.kv = step.kv(),
                    .num_rows = step.num_rows(),
                    .num_heads = step.num_heads(),
                    .out_dim = args.out_dim,
                    .state = args.state,
                    .out = args.out});
    return;
  }
  attend_->AttendStaged({.kv = step.kv(),
                         .num_heads = step.num_heads(),
                         .num_rows = step.num_rows(),
                         .plan = reinterpret_cast<const kernels::SliceSizes*>(
                             StagedInputs(args.step) + PlanAt(step.num_rows())),
                         .layer = args.layer,
                         .q = args.q,
                         .out_dim = args.out_dim,
                         .out = args.out});
}

absl::Status CudaOps::BeginRecording() {
  RETURN_IF_ERROR(device_.compute().BeginCapture());
  absl::Status used = cublas_->UseStream(stream());
  if (!used.ok()) EndRecording().status().IgnoreError();
  return used;
}

absl::StatusOr<std::unique_ptr<Recording>> CudaOps::EndRecording() {
  absl::StatusOr<std::unique_ptr<device::CapturedWork>> work = device_.compute().EndCapture();
  RETURN_IF_ERROR(cublas_->UseStream(stream()));
  RETURN_IF_ERROR(work.status());
  return std::make_unique<GraphRecording>(*std::move(work));
}

void CudaOps::Replay(const Recording& recording) {
  Check(cudaGraphLaunch(static_cast<const GraphRecording&>(recording).graph(), stream()),
        "launch of a recorded step");
}

}  // namespace writescope::ops
