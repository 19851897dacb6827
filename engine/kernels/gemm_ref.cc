#include "engine/base/bf16.h"
#include "engine/kernels/gemm.h"

namespace writescope::kernels {

void GemmRef(const GemmArgs& args) {
  for (int64_t t = 0; t < args.num_rows; ++t) {
    for (int64_t n = 0; n < args.n; ++n) {
      double sum = args.accumulate ? args.y[t * args.y_stride + n] : 0;
      for (int64_t k = 0; k < args.k; ++k) {
        const int64_t at = n * args.k + k;
        const double w = args.w_is_bf16 ? Bf16ToFloat(reinterpret_cast<const uint16_t*>(args.w)[at])
                                        : reinterpret_cast<const float*>(args.w)[at];
        sum += static_cast<double>(args.x[t * args.x_stride + k]) * w;
      }
      args.y[t * args.y_stride + n] = static_cast<float>(sum);
    }
  }
}

}  // namespace writescope::kernels
