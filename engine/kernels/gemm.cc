#include "engine/kernels/gemm.h"

#include <cblas.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

#include "engine/base/bf16.h"
#include "engine/base/check.h"

namespace writescope::kernels {
namespace {

// The packaged sequential build hands one work buffer to two callers at once (its allocator takes
// no lock), which showed as wrong products under load. It is used by one thread at a time; the
// threaded builds lock by themselves.
std::mutex* SequentialBuildMutex() {
  static std::mutex* mutex = [] {
    constexpr int kSequential = 0;
    // Our callers spread the work; the library's own threads would only get in their way.
    openblas_set_num_threads(1);
    return openblas_get_parallel() == kSequential ? new std::mutex : nullptr;
  }();
  return mutex;
}

// OpenBLAS needs SSE3, which the first 64-bit processors do not offer.
bool OffersBlas() {
  static const bool offers = [] {
    __builtin_cpu_init();
    return __builtin_cpu_supports("sse3") != 0;
  }();
  return offers;
}

void PlainSgemm(int64_t m, int64_t n, int64_t k, const float* x, int64_t x_stride, const float* w,
                int64_t w_stride, bool accumulate, float* y, int64_t y_stride) {
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      float sum = accumulate ? y[i * y_stride + j] : 0.0f;
      for (int64_t d = 0; d < k; ++d) sum += x[i * x_stride + d] * w[j * w_stride + d];
      y[i * y_stride + j] = sum;
    }
  }
}

void Sgemm(int64_t m, int64_t n, int64_t k, const float* x, int64_t x_stride, const float* w,
           int64_t w_stride, bool accumulate, float* y, int64_t y_stride) {
  if (!OffersBlas()) {
    PlainSgemm(m, n, k, x, x_stride, w, w_stride, accumulate, y, y_stride);
    return;
  }
  std::unique_lock<std::mutex> lock;
  if (std::mutex* mutex = SequentialBuildMutex()) lock = std::unique_lock(*mutex);
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, static_cast<blasint>(m),
              static_cast<blasint>(n), static_cast<blasint>(k), 1.0f, x,
              static_cast<blasint>(x_stride), w, static_cast<blasint>(w_stride),
              accumulate ? 1.0f : 0.0f, y, static_cast<blasint>(y_stride));
}

// Columns first to first + cols of row `row` of W, as floats.
void WidenRow(const GemmArgs& args, int64_t row, int64_t first, int64_t cols, float* to) {
  const std::byte* from = args.w + row * GemmRowBytes(args.type, args.k);
  if (args.type == GemmWeights::kInt4) {
    WidenInt4Row(from, first, cols, to);
    return;
  }
  const uint16_t* bits = reinterpret_cast<const uint16_t*>(from) + first;
  for (int64_t i = 0; i < cols; ++i) to[i] = Bf16ToFloat(bits[i]);
}

// Whether every caller gets the same product when several call at once.
bool SurvivesConcurrentCalls() {
  constexpr int64_t kM = 64, kN = 32, kK = 128;
  constexpr int kThreads = 4, kCalls = 400;
  std::vector<int> wrong(kThreads, 0);
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([t, &wrong] {
      const std::vector<float> x(kM * kK, 0.5f + static_cast<float>(t)), w(kN * kK, 0.25f);
      std::vector<float> y(kM * kN);
      const float want = (0.5f + static_cast<float>(t)) * 0.25f * kK;
      for (int call = 0; call < kCalls; ++call) {
        Sgemm(kM, kN, kK, x.data(), kK, w.data(), kK, false, y.data(), kN);
        for (const float value : y) wrong[static_cast<size_t>(t)] += value != want;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return std::all_of(wrong.begin(), wrong.end(), [](int count) { return count == 0; });
}

}  // namespace

void GemmPanel(const GemmArgs& args, float* scratch) {
  DCHECK(args.n <= kGemmPanelRows);
  const bool small = args.num_rows <= kSmallGemmRows;
  if (small && args.type != GemmWeights::kInt4) {
    ActiveSmallGemmVariant().run(args);
    return;
  }
  if (args.type == GemmWeights::kF32) {
    Sgemm(args.num_rows, args.n, args.k, args.x, args.x_stride,
          reinterpret_cast<const float*>(args.w), args.k, args.accumulate, args.y, args.y_stride);
    return;
  }
  static_assert(kGemmBlockCols % kInt4GroupCols == 0);
  for (int64_t first = 0; first < args.k; first += kGemmBlockCols) {
    const int64_t cols = std::min(kGemmBlockCols, args.k - first);
    for (int64_t row = 0; row < args.n; ++row) {
      WidenRow(args, row, first, cols, scratch + row * cols);
    }
    GemmArgs block = args;
    block.k = cols;
    block.x += first;
    block.w = reinterpret_cast<const std::byte*>(scratch);
    block.type = GemmWeights::kF32;
    block.accumulate = args.accumulate || first > 0;
    if (small) {
      ActiveSmallGemmVariant().run(block);
    } else {
      Sgemm(block.num_rows, block.n, cols, block.x, block.x_stride, scratch, cols, block.accumulate,
            block.y, block.y_stride);
    }
  }
}

std::string BlasSelfTest() {
  // Shapes that reach the packed kernels, their edges and the small-matrix paths.
  constexpr int64_t kShapes[][3] = {{9, 7, 33}, {16, 128, 129}, {61, 47, 300}, {130, 128, 512}};
  uint32_t state = 12345;
  const auto next = [&state] {
    state = state * 1664525u + 1013904223u;
    return static_cast<float>(state >> 8) / 8388608.0f - 1.0f;
  };
  for (const auto& [m, n, k] : kShapes) {
    std::vector<float> x(m * k), w(n * k), y(m * n, 0.5f);
    for (float& value : x) value = next();
    for (float& value : w) value = next();
    Sgemm(m, n, k, x.data(), k, w.data(), k, true, y.data(), n);
    for (int64_t i = 0; i < m * n; ++i) {
      double want = 0.5, magnitude = 0.5;
      for (int64_t d = 0; d < k; ++d) {
        const double product = static_cast<double>(x[i / n * k + d]) * w[i % n * k + d];
        want += product;
        magnitude += std::fabs(product);
      }
      // A sum of k floats strays by at most k * 2^-24 of its magnitude.
      if (!(std::fabs(y[i] - want) <= 6e-8 * static_cast<double>(k) * magnitude)) {
        return "OpenBLAS computes wrong results here: core type " +
               std::string(openblas_get_corename()) + ", sgemm of " + std::to_string(m) + " x " +
               std::to_string(n) + " x " + std::to_string(k) + " gives " + std::to_string(y[i]) +
               " instead of " + std::to_string(want) +
               "; set OPENBLAS_CORETYPE=Haswell in the environment, or install a newer OpenBLAS";
      }
    }
  }
  if (!SurvivesConcurrentCalls()) {
    return "OpenBLAS mixes up calls from several threads here (" +
           std::string(openblas_get_config()) +
           "); install the build with threads, libopenblas0-pthread";
  }
  return {};
}

}  // namespace writescope::kernels
