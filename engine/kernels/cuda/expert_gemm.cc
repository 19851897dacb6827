// Which of the experts' kernels can run, and the way to each.
#include "engine/kernels/cuda/expert_gemm.h"

#include "engine/kernels/quantize_int4.h"

namespace writescope::kernels {
namespace {

int ComputeMajor() {
  static const int major = [] {
    int device = 0, value = 0;
    const bool known =
        cudaGetDevice(&device) == cudaSuccess &&
        cudaDeviceGetAttribute(&value, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess;
    return known ? value : 0;
  }();
  return major;
}

}  // namespace

bool CanRun(ExpertKernel kernel, ExpertWeights weights, int rows, int cols, bool gated) {
  const int block_rows = gated ? rows * 2 : rows;
  const bool groups = weights == ExpertWeights::kInt4 && cols % kInt4GroupCols == 0;
  switch (kernel) {
    case ExpertKernel::kSimt:
      return true;
    case ExpertKernel::kStream:
    case ExpertKernel::kTile:
      return weights != ExpertWeights::kF32 && ComputeMajor() >= 8;
    case ExpertKernel::kRing:
      return groups && block_rows % kRingRows == 0 && ComputeMajor() >= 9 && RingIsBuilt();
    case ExpertKernel::kWide:
      return groups && block_rows % kWideRows == 0 && ComputeMajor() == 9 && WideIsBuilt();
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
