#include <vector>

#include "engine/base/bf16.h"
#include "engine/kernels/gemm.h"

namespace writescope::kernels {
namespace {

// Row n of W.
std::vector<double> WeightRow(const GemmArgs& args, int64_t n) {
  const std::byte* from = args.w + n * GemmRowBytes(args.type, args.k);
  std::vector<double> row(args.k);
  for (int64_t k = 0; k < args.k; ++k) {
    if (args.type == GemmWeights::kInt4) {
      const int64_t group = k / kInt4GroupCols, i = k % kInt4GroupCols;
      const std::byte* at = from + group * kInt4RowGroupBytes;
      const int pair = static_cast<int>(at[i % 64]);
      const int scale = static_cast<int>(at[64]) + 256 * static_cast<int>(at[65]);
      row[k] = ((i < 64 ? pair % 16 : pair / 16) - kInt4Bias) *
               static_cast<double>(Bf16ToFloat(static_cast<uint16_t>(scale)));
    } else if (args.type == GemmWeights::kBf16) {
      row[k] = Bf16ToFloat(reinterpret_cast<const uint16_t*>(from)[k]);
    } else {
      row[k] = reinterpret_cast<const float*>(from)[k];
    }
  }
  return row;
}

}  // namespace

void GemmRef(const GemmArgs& args) {
  for (int64_t n = 0; n < args.n; ++n) {
    const std::vector<double> w = WeightRow(args, n);
    for (int64_t t = 0; t < args.num_rows; ++t) {
      double sum = args.accumulate ? args.y[t * args.y_stride + n] : 0;
      for (int64_t k = 0; k < args.k; ++k) {
        sum += static_cast<double>(args.x[t * args.x_stride + k]) * w[k];
      }
      args.y[t * args.y_stride + n] = static_cast<float>(sum);
    }
  }
}

}  // namespace writescope::kernels
