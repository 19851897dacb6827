// Which of the experts' kernels can run, and the way to each.
#include "engine/kernels/cuda/expert_gemm.h"

#include "engine/kernels/cuda/gpu_properties.h"

namespace writescope::kernels {

bool CanRun(ExpertKernel kernel, const ExpertMatrix& matrix) {
  if (!TakesMatrix(kernel, matrix)) return false;
  switch (kernel) {
    case ExpertKernel::kSimt:
      return true;
    case ExpertKernel::kStream:
    case ExpertKernel::kTile:
      return ComputeMajor() >= 8;
    case ExpertKernel::kRing:
      return ComputeMajor() >= 9 && RingIsBuilt();
    case ExpertKernel::kWide:
      return ComputeMajor() == 9 && WideIsBuilt();
  }
  return false;
}

cudaError_t LaunchExpertGemm(cudaStream_t stream, ValueType type, const ExpertPlan& plan,
                             const ExpertGemmArgs& args) {
  switch (plan.kernel) {
    case ExpertKernel::kSimt:
      return LaunchExpertGemmSimt(stream, type, args);
    case ExpertKernel::kStream:
      return LaunchExpertGemmStream(stream, plan.tile_slots, args);
    case ExpertKernel::kRing:
      return LaunchExpertGemmRing(stream, plan.tile_slots, args);
    case ExpertKernel::kTile:
      return LaunchExpertGemmTile(stream, plan.tile_slots, args);
    case ExpertKernel::kWide:
      return LaunchExpertGemmWide(stream, args);
  }
  return cudaErrorInvalidValue;
}

}  // namespace writescope::kernels
