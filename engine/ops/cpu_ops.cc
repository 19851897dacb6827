#include "engine/ops/cpu_ops.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/base/bf16.h"
#include "engine/base/check.h"
#include "engine/base/status_macros.h"
#include "engine/kernels/elementwise.h"
#include "engine/kernels/int4_rows.h"
#include "engine/kernels/random_weight.h"
#include "engine/ops/cpu_ops_impl.h"

namespace writescope::ops {
namespace {

// Small batches compute all their (token, expert) pairs in one wave.
constexpr int64_t kWaveSlotsMin = 1024;
constexpr int64_t kFloatsPerLine = 16;  // A cache line; arrays begin on one.

int64_t WeightBytes(WeightType type) { return type == WeightType::kBf16 ? 2 : 4; }

int64_t RowBytes(WeightType source, WeightFormat format, int64_t cols) {
  return format == WeightFormat::kInt4 ? kernels::Int4RowBytes(cols) : cols * WeightBytes(source);
}

int64_t MatrixBytesOnCpu(WeightType source, WeightFormat format, int64_t rows, int64_t cols) {
  return RoundUp(rows * RowBytes(source, format, cols), 64);
}

absl::Status CheckMatrix(WeightType source, int64_t rows, int64_t cols) {
  if (rows < 1 || cols < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("a matrix of ", rows, " rows and ", cols, " columns"));
  }
  if (source == WeightType::kInt4) {
    return absl::InvalidArgumentError("the source of a matrix is float32 or bfloat16");
  }
  return absl::OkStatus();
}

}  // namespace

CpuWorkspace CpuWorkspace::For(const OpsLimits& limits) {
  CpuWorkspace layout;
  const auto take = [&layout](int64_t num_floats) {
    const int64_t at = layout.num_floats;
    layout.num_floats += RoundUp(num_floats, kFloatsPerLine);
    return at;
  };
  const int64_t tokens = limits.max_tokens;
  layout.num_slots =
      std::max(tokens, std::min<int64_t>(tokens * limits.experts_per_token, kWaveSlotsMin));
  layout.probabilities = take(tokens * limits.num_experts);
  layout.gathered = take(layout.num_slots * limits.hidden);
  layout.activated = take(layout.num_slots * limits.max_mlp_width);
  layout.results = take(layout.num_slots * limits.hidden);
  return layout;
}

int64_t CpuOpsWorkspaceBytes(const OpsLimits& limits) {
  return CpuWorkspace::For(limits).num_floats * static_cast<int64_t>(sizeof(float));
}

absl::StatusOr<std::unique_ptr<Ops>> CreateCpuOps(device::CpuDevice& device,
                                                  const OpsLimits& limits) {
  if (limits.max_tokens < 1 || limits.hidden < 1 || limits.max_head_dim < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("operations for at most ", limits.max_tokens, " tokens of ", limits.hidden,
                     " values with heads of ", limits.max_head_dim, ": each must be at least 1"));
  }
  static const std::string blas_fault = kernels::BlasSelfTest();
  if (!blas_fault.empty()) return absl::FailedPreconditionError(blas_fault);
  ASSIGN_OR_RETURN(device::Buffer workspace,
                   device.AllocateDevice(CpuOpsWorkspaceBytes(limits), "workspace of operations"));
  return std::make_unique<CpuOps>(device, limits, std::move(workspace));
}

CpuOps::CpuOps(device::CpuDevice& device, const OpsLimits& limits, device::Buffer workspace)
    : device_(device),
      limits_(limits),
      layout_(CpuWorkspace::For(limits)),
      workspace_(std::move(workspace)),
      scratch_(device.team().num_threads()) {
  for (Scratch& scratch : scratch_) {
    scratch.gemm.resize(kernels::kGemmScratchFloats);
    scratch.panel.resize(kItemRows * kItemCols);
  }
  const int64_t chosen = int64_t{limits.max_tokens} * limits.experts_per_token;
  chosen_.resize(chosen);
  weights_.resize(chosen);
}

OpsFootprint CpuOpsFootprint() {
  return {.activation_bytes = sizeof(float),
          .matrix_bytes = &MatrixBytesOnCpu,
          .workspace_bytes = &CpuOpsWorkspaceBytes};
}

absl::StatusOr<Matrix> CpuOps::LoadMatrix(std::byte* to, WeightType source, WeightFormat format,
                                          int64_t rows, int64_t cols, const std::byte* from) {
  RETURN_IF_ERROR(CheckMatrix(source, rows, cols));
  // The device's memory is host memory, and nothing on the queue uses a matrix that is not there
  // yet.
  const int64_t row_bytes = cols * WeightBytes(source);
  if (format == WeightFormat::kSource) {
    std::memcpy(to, from, static_cast<size_t>(rows * row_bytes));
    return Matrix{.data = to, .type = source, .rows = rows, .cols = cols};
  }
  std::vector<float> values(cols);
  for (int64_t row = 0; row < rows; ++row) {
    if (source == WeightType::kBf16) {
      kernels::Bf16ToFloats(cols, from + row * row_bytes, values.data());
    } else {
      std::memcpy(values.data(), from + row * row_bytes, static_cast<size_t>(row_bytes));
    }
    kernels::QuantizeInt4Row(cols, values.data(), to + row * kernels::Int4RowBytes(cols));
  }
  return Matrix{.data = to, .type = WeightType::kInt4, .rows = rows, .cols = cols};
}

absl::StatusOr<Matrix> CpuOps::RandomMatrix(std::byte* to, WeightType source, WeightFormat format,
                                            int64_t rows, int64_t cols, float sigma,
                                            uint64_t seed) {
  RETURN_IF_ERROR(CheckMatrix(source, rows, cols));
  // Row by row through LoadMatrix, so that the values are those of a checkpoint of this source.
  const int64_t row_bytes = RowBytes(source, format, cols);
  std::vector<float> values(cols);
  std::vector<uint16_t> halves(cols);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t col = 0; col < cols; ++col) {
      const auto at = static_cast<uint64_t>(row * cols + col);
      values[col] = kernels::RandomWeight(seed, at, sigma);
      halves[col] = FloatToBf16(values[col]);
    }
    const void* from = source == WeightType::kBf16 ? static_cast<const void*>(halves.data())
                                                   : static_cast<const void*>(values.data());
    RETURN_IF_ERROR(LoadMatrix(to + row * row_bytes, source, format, 1, cols,
                               static_cast<const std::byte*>(from))
                        .status());
  }
  return Matrix{.data = to,
                .type = format == WeightFormat::kInt4 ? WeightType::kInt4 : source,
                .rows = rows,
                .cols = cols};
}

absl::StatusOr<const float*> CpuOps::LoadVector(std::byte* to, int64_t count, const float* from) {
  if (count < 1) return absl::InvalidArgumentError(absl::StrCat("a vector of ", count, " values"));
  std::memcpy(to, from, static_cast<size_t>(count) * sizeof(float));
  return reinterpret_cast<const float*>(to);
}

void CpuOps::Embed(std::span<const TokenId> ids, const Matrix& table, void* out) {
  for (const TokenId id : ids) {
    CHECK(id >= 0 && id < table.rows) << "token " << id << " of a vocabulary of " << table.rows;
  }
  device_.compute().Launch([table, out, ids = std::vector<TokenId>(ids.begin(), ids.end())] {
    float* to = static_cast<float*>(out);
    for (const TokenId id : ids) {
      const std::byte* from = table.data + id * table.cols * WeightBytes(table.type);
      if (table.type == WeightType::kBf16) {
        kernels::Bf16ToFloats(table.cols, from, to);
      } else {
        std::memcpy(to, from, static_cast<size_t>(table.cols) * sizeof(float));
      }
      to += table.cols;
    }
  });
}

void CpuOps::RmsNorm(int num_rows, int dim, const void* x, const float* weight, float eps,
                     void* out) {
  device_.compute().Launch([=, this] {
    constexpr int64_t kRowsPerItem = 16;
    const double work_us = 8.0 * num_rows * dim / kBytesPerUs;
    ForItems(CeilDiv(num_rows, kRowsPerItem), work_us, [=](int64_t item, int) {
      const int64_t last = std::min<int64_t>(num_rows, (item + 1) * kRowsPerItem);
      for (int64_t row = item * kRowsPerItem; row < last; ++row) {
        kernels::RmsNormRow(dim, static_cast<const float*>(x) + row * dim, weight, eps,
                            static_cast<float*>(out) + row * dim);
      }
    });
  });
}

void CpuOps::Linear(int num_rows, const void* x, const Matrix& w, void* out, bool accumulate) {
  device_.compute().Launch([=, this] {
    const Product product = {.num_rows = num_rows,
                             .x = static_cast<const float*>(x),
                             .x_stride = w.cols,
                             .w = w,
                             .y = static_cast<float*>(out),
                             .y_stride = w.rows,
                             .accumulate = accumulate};
    RunProducts({&product, 1});
  });
}

void CpuOps::GatherRows(std::span<const int> rows, int dim, const void* x, void* out) {
  device_.compute().Launch([=, rows = std::vector<int>(rows.begin(), rows.end())] {
    for (size_t i = 0; i < rows.size(); ++i) {
      std::memcpy(static_cast<float*>(out) + static_cast<int64_t>(i) * dim,
                  static_cast<const float*>(x) + int64_t{rows[i]} * dim,
                  static_cast<size_t>(dim) * sizeof(float));
    }
  });
}

void CpuOps::MaxOfRows(int num_rows, int dim, const void* x, kernels::RowMax* to) {
  device_.compute().Launch([=, this] {
    const double work_us = 4.0 * num_rows * dim / kBytesPerUs;
    ForItems(num_rows, work_us, [=](int64_t row, int) {
      to[row] = kernels::MaxOfRow(dim, static_cast<const float*>(x) + row * dim);
    });
  });
}

void CpuOps::DownloadFloats(const void* from, int64_t count, float* to) {
  device_.compute().Launch(
      [=] { std::memcpy(to, from, static_cast<size_t>(count) * sizeof(float)); });
}

void CpuOps::PublishQueries(const PublishArgs& args) {
  device::CpuQueue& queue = device_.compute();
  if (args.began_s != nullptr) queue.RecordTime(args.began_s);
  queue.Launch([to = args.to, q = args.q, count = args.num_values, this] {
    if (device_.compute().failed()) return;
    std::memcpy(to, q, static_cast<size_t>(count) * sizeof(float));
  });
  if (args.ended_s != nullptr) queue.RecordTime(args.ended_s);
  queue.SetFlag(args.ready, args.value);
}

}  // namespace writescope::ops
