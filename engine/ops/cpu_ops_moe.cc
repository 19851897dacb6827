// Matrix products, the gated MLP and the mixture of experts on the CPU device.
#include <algorithm>
#include <cstring>

#include "engine/base/check.h"
#include "engine/kernels/elementwise.h"
#include "engine/ops/cpu_ops_impl.h"

namespace writescope::ops {
namespace {

// A part of one of several products: which, and where it begins.
struct Part {
  int index;
  int64_t row;
  int64_t col;
};

// Cuts the product `index`, num_rows by num_cols, into items. The cuts depend on nothing but the
// sizes: the large path of the matrix product may round differently where it is cut elsewhere.
void AppendParts(int index, int64_t num_rows, int64_t num_cols, std::vector<Part>* parts) {
  for (int64_t col = 0; col < num_cols; col += kItemCols) {
    for (int64_t row = 0; row < num_rows; row += kItemRows) parts->push_back({index, row, col});
  }
}

kernels::GemmWeights GemmType(const Matrix& w) {
  switch (w.type) {
    case WeightType::kF32:
      return kernels::GemmWeights::kF32;
    case WeightType::kBf16:
      return kernels::GemmWeights::kBf16;
    case WeightType::kInt4:
      return kernels::GemmWeights::kInt4;
  }
  CHECK(false) << "weight type " << static_cast<int>(w.type);
}

double ProductUs(int64_t num_rows, const Matrix& w) {
  const double elements = static_cast<double>(w.rows) * static_cast<double>(w.cols);
  const double bytes = static_cast<double>(w.rows * kernels::GemmRowBytes(GemmType(w), w.cols));
  return std::max(bytes / kBytesPerUs, 2 * elements * static_cast<double>(num_rows) / kFlopsPerUs);
}

// The panel of `w` that begins at row `col`, for `num_rows` rows.
kernels::GemmArgs PanelArgs(const Matrix& w, int64_t col, int64_t num_rows, const float* x,
                            int64_t x_stride, float* y, int64_t y_stride, bool accumulate) {
  const kernels::GemmWeights type = GemmType(w);
  return {.num_rows = num_rows,
          .n = std::min(kItemCols, w.rows - col),
          .k = w.cols,
          .x = x,
          .x_stride = x_stride,
          .w = w.data + col * kernels::GemmRowBytes(type, w.cols),
          .type = type,
          .y = y,
          .y_stride = y_stride,
          .accumulate = accumulate};
}

}  // namespace

void CpuOps::RunProducts(std::span<const Product> products) {
  std::vector<Part> parts;
  double work_us = 0;
  for (size_t i = 0; i < products.size(); ++i) {
    AppendParts(static_cast<int>(i), products[i].num_rows, products[i].w.rows, &parts);
    work_us += ProductUs(products[i].num_rows, products[i].w);
  }
  ForItems(static_cast<int64_t>(parts.size()), work_us, [&](int64_t item, int thread) {
    const Part& part = parts[item];
    const Product& product = products[part.index];
    const int64_t rows = std::min(kItemRows, product.num_rows - part.row);
    float* y = product.y + part.row * product.y_stride + part.col;
    const kernels::GemmArgs args =
        PanelArgs(product.w, part.col, rows, product.x + part.row * product.x_stride,
                  product.x_stride, y, product.y_stride, product.accumulate);
    kernels::GemmPanel(args, scratch_[thread].gemm.data());
    if (product.scale == 1) return;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < args.n; ++c) y[r * product.y_stride + c] *= product.scale;
    }
  });
}

void CpuOps::RunMlpJobs(std::span<const MlpJob> jobs) {
  std::vector<Part> parts;
  std::vector<Product> down;
  double work_us = 0;
  for (size_t i = 0; i < jobs.size(); ++i) {
    const MlpJob& job = jobs[i];
    const Matrix& gate = job.weights->gate;
    CHECK_LE(gate.rows, limits_.max_mlp_width);
    AppendParts(static_cast<int>(i), job.num_rows, gate.rows, &parts);
    work_us += 2 * ProductUs(job.num_rows, gate);
    down.push_back({.num_rows = job.num_rows,
                    .x = job.activated,
                    .x_stride = gate.rows,
                    .w = job.weights->down,
                    .y = job.out,
                    .y_stride = job.weights->down.rows,
                    .accumulate = job.accumulate});
  }
  ForItems(static_cast<int64_t>(parts.size()), work_us, [&](int64_t item, int thread) {
    const Part& part = parts[item];
    const MlpJob& job = jobs[part.index];
    const Matrix& gate = job.weights->gate;
    const int64_t rows = std::min(kItemRows, job.num_rows - part.row);
    const float* x = job.x + part.row * gate.cols;
    float* activated = job.activated + part.row * gate.rows + part.col;
    Scratch& scratch = scratch_[thread];
    float* up = scratch.panel.data();
    const kernels::GemmArgs args =
        PanelArgs(gate, part.col, rows, x, gate.cols, activated, gate.rows, false);
    kernels::GemmPanel(args, scratch.gemm.data());
    kernels::GemmPanel(
        PanelArgs(job.weights->up, part.col, rows, x, gate.cols, up, kItemCols, false),
        scratch.gemm.data());
    for (int64_t r = 0; r < rows; ++r) {
      float* row = activated + r * gate.rows;
      kernels::SwiGlu(args.n, row, up + r * kItemCols, row);
    }
  });
  RunProducts(down);
}

void CpuOps::Mlp(int num_rows, const void* x, const MlpWeights& w, void* out) {
  CHECK_LE(num_rows, layout_.num_slots);
  device_.compute().Launch([=, this] {
    const MlpJob job = {.weights = &w,
                        .x = static_cast<const float*>(x),
                        .num_rows = num_rows,
                        .activated = Workspace(layout_.activated),
                        .out = static_cast<float*>(out),
                        .accumulate = true};
    RunMlpJobs({&job, 1});
  });
}

void CpuOps::Moe(const MoeArgs& given) {
  MoeArgs args = given;
  if (args.first_norm != nullptr) {
    RmsNorm(args.num_tokens, args.hidden, args.out, args.first_norm, args.norm_eps, args.normed);
    args.x = args.normed;
  }
  CHECK_LE(args.num_tokens, limits_.max_tokens);
  CHECK_LE(args.hidden, limits_.hidden);
  CHECK_LE(static_cast<int>(args.experts.size()), limits_.num_experts);
  CHECK_LE(args.experts_per_token, limits_.experts_per_token);
  CHECK_EQ(args.router.rows, static_cast<int64_t>(args.experts.size()));
  CHECK(args.experts_per_token <= args.router.rows / args.num_groups * args.topk_groups);
  MoeCall call = {
      .args = args, .experts = {args.experts.begin(), args.experts.end()}, .shared = {}};
  if (args.shared != nullptr) call.shared = *args.shared;
  device_.compute().Launch([this, call = std::move(call)] { RunMoe(call); });
  if (args.norm == nullptr) return;
  RmsNorm(args.num_tokens, args.hidden, args.out, args.norm, args.norm_eps, args.normed);
}

// Fills chosen_ and weights_.
void CpuOps::RouteAll(const MoeCall& call) {
  const MoeArgs& args = call.args;
  const int num_experts = static_cast<int>(call.experts.size());
  float* logits = Workspace(layout_.probabilities);
  const Product product = {.num_rows = args.num_tokens,
                           .x = static_cast<const float*>(args.x),
                           .x_stride = args.hidden,
                           .w = args.router,
                           .y = logits,
                           .y_stride = num_experts};
  RunProducts({&product, 1});
  const kernels::RouterConfig config = {.num_experts = num_experts,
                                        .experts_per_token = args.experts_per_token,
                                        .renormalize = args.renormalize,
                                        .routed_scale = args.routed_scale,
                                        .num_groups = args.num_groups,
                                        .topk_groups = args.topk_groups};
  // An exp and about k passes for each logit, a few ns each.
  const double work_us = 0.01 * num_experts * args.num_tokens;
  ForItems(args.num_tokens, work_us, [&](int64_t token, int) {
    const int64_t at = token * args.experts_per_token;
    float* token_logits = logits + token * num_experts;
    if (args.choice.replay != nullptr) {
      std::copy_n(args.choice.replay + at, args.experts_per_token, &chosen_[at]);
      kernels::WeighChosen(config, token_logits, &chosen_[at], &weights_[at]);
    } else {
      kernels::RouteToken(config, token_logits, &chosen_[at], &weights_[at]);
    }
    if (args.choice.record != nullptr) {
      std::copy_n(&chosen_[at], args.experts_per_token, args.choice.record + at);
    }
  });
}

// Gathers the rows of the wave, runs its experts, and adds their results to the tokens in the order
// of the slots, which is that of the experts.
void CpuOps::RunMoeWave(const MoeCall& call, std::span<const MlpJob> jobs,
                        std::span<const Slot> slots) {
  if (slots.empty()) return;
  const int64_t hidden = call.args.hidden;
  const float* x = static_cast<const float*>(call.args.x);
  float* gathered = Workspace(layout_.gathered);
  const int64_t num_slots = static_cast<int64_t>(slots.size());
  const double copy_us = 8.0 * static_cast<double>(num_slots * hidden) / kBytesPerUs;
  ForItems(num_slots, copy_us, [&](int64_t slot, int) {
    std::memcpy(gathered + slot * hidden, x + slots[slot].token * hidden, hidden * sizeof(float));
  });
  RunMlpJobs(jobs);
  constexpr int64_t kColsPerItem = 256;
  const float* results = Workspace(layout_.results);
  float* out = static_cast<float*>(call.args.out);
  ForItems(CeilDiv(hidden, kColsPerItem), copy_us, [&](int64_t item, int) {
    const int64_t first = item * kColsPerItem;
    const int64_t last = std::min(hidden, first + kColsPerItem);
    for (int64_t slot = 0; slot < num_slots; ++slot) {
      const float weight = slots[slot].weight;
      const float* from = results + slot * hidden;
      float* to = out + slots[slot].token * hidden;
      for (int64_t c = first; c < last; ++c) to[c] += weight * from[c];
    }
  });
}

void CpuOps::RunMoe(const MoeCall& call) {
  const MoeArgs& args = call.args;
  RouteAll(call);
  // The slots of each expert, tokens in rising order.
  const int num_experts = static_cast<int>(call.experts.size());
  std::vector<std::vector<Slot>> slots_of(num_experts);
  for (int64_t i = 0; i < int64_t{args.num_tokens} * args.experts_per_token; ++i) {
    CHECK(chosen_[i] >= 0 && chosen_[i] < num_experts) << "expert " << chosen_[i];
    slots_of[chosen_[i]].push_back({static_cast<int>(i / args.experts_per_token), weights_[i]});
  }
  std::vector<MlpJob> jobs;
  std::vector<Slot> slots;
  for (int e = 0; e < num_experts; ++e) {
    if (slots_of[e].empty()) continue;
    if (static_cast<int64_t>(slots.size() + slots_of[e].size()) > layout_.num_slots) {
      RunMoeWave(call, jobs, slots);
      jobs.clear();
      slots.clear();
    }
    const int64_t first = static_cast<int64_t>(slots.size());
    const MlpWeights& weights = call.experts[e];
    jobs.push_back({.weights = &weights,
                    .x = Workspace(layout_.gathered) + first * args.hidden,
                    .num_rows = static_cast<int64_t>(slots_of[e].size()),
                    .activated = Workspace(layout_.activated) + first * limits_.max_mlp_width,
                    .out = Workspace(layout_.results) + first * args.hidden});
    slots.insert(slots.end(), slots_of[e].begin(), slots_of[e].end());
  }
  RunMoeWave(call, jobs, slots);
  if (!call.shared.has_value()) return;
  const MlpJob shared = {.weights = &*call.shared,
                         .x = static_cast<const float*>(args.x),
                         .num_rows = args.num_tokens,
                         .activated = Workspace(layout_.activated),
                         .out = static_cast<float*>(args.out),
                         .accumulate = true};
  RunMlpJobs({&shared, 1});
}

}  // namespace writescope::ops
