#include "tests/support/attention_rig.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/base/bf16.h"
#include "engine/base/check.h"
#include "engine/base/status_macros.h"
#include "engine/ops/cpu_ops.h"

namespace writescope::testing {
namespace {

float Stored(float value, KvDtype dtype) {
  return dtype == KvDtype::kBf16 ? Bf16ToFloat(FloatToBf16(value)) : value;
}

device::Buffer DeviceFloats(device::Device& device, int64_t count) {
  auto buffer = device.AllocateDevice(count * 4, "test rows");
  CHECK(buffer.ok()) << buffer.status().ToString();
  return *std::move(buffer);
}

}  // namespace

QuerySource RandomQueries(uint64_t seed, int k_dim, double score_sigma) {
  // Keys and queries are uniform in [-1, 1) with variance 1/3 each, so a score has k_dim / 9.
  const double scale = score_sigma * 3 / std::sqrt(k_dim);
  return [seed, scale](int layer, int reader, int64_t position, int head, std::span<float> q) {
    uint64_t at = Mix(Mix(seed, static_cast<uint64_t>(layer)), static_cast<uint64_t>(reader));
    at = Mix(Mix(at, static_cast<uint64_t>(position)), static_cast<uint64_t>(head));
    for (float& value : q) {
      value = static_cast<float>(scale * (2 * UnitReal(at = Mix(at, 3)) - 1));
    }
  };
}

StepRequest DecodeRequest(std::span<const int> slots, const attention::SharePlan& share) {
  StepRequest request{.share = share};
  for (const int slot : slots) request.parts.push_back({slot, {7 + slot}});
  return request;
}

AttentionRig::AttentionRig(const AttentionRigOptions& options, const DeviceWrapper& wrap)
    : options_(options),
      cache_(options.cache, wrap),
      queries_(RandomQueries(1, options.cache.geometry.k_dim, 1.0)),
      max_rows_(std::max(options.cache.chunk_tokens, options.cache.max_sequences)) {
  const KvGeometry& kv = options.cache.geometry;
  auto ops = ops::CreateCpuOps(cache_.device(), {.max_tokens = max_rows_,
                                                 .hidden = 32,
                                                 .max_mlp_width = 32,
                                                 .num_experts = 1,
                                                 .experts_per_token = 1,
                                                 .num_heads = options.num_heads,
                                                 .max_head_dim = kv.k_dim});
  CHECK(ops.ok()) << ops.status().ToString();
  ops_ = *std::move(ops);
  auto hybrid =
      attention::HybridAttention::Create({.geometry = kv,
                                          .num_layers = options.cache.num_layers,
                                          .num_heads = options.num_heads,
                                          .out_dim = kv.v_dim,
                                          .max_sequences = options.cache.max_sequences,
                                          .num_workers = options.workers,
                                          .ring_bytes = options.ring_blocks * kv.block_bytes(),
                                          .wait_limit = options.wait_limit,
                                          .nap = options.nap},
                                         *ops_, cache_.blocks());
  CHECK(hybrid.ok()) << hybrid.status().ToString();
  hybrid_ = *std::move(hybrid);
  const int64_t heads = int64_t{max_rows_} * options.num_heads;
  q_ = DeviceFloats(cache_.device(), heads * kv.k_dim);
  states_ = DeviceFloats(cache_.device(), heads * (kv.v_dim + 2));
  out_ = DeviceFloats(cache_.device(), heads * kv.v_dim);
}

AttentionRig::~AttentionRig() {
  // After a failed step there may be work left that uses the buffers, and threads that submit it.
  hybrid_.reset();
  device::AwaitIdle({&cache_.device().compute()}, "attention rig");
}

void AttentionRig::SubmitDense(const StepRequest& request,
                               const std::vector<kvcache::WritePlan>& plans,
                               const MicroBatch& batch, int layer) {
  struct Rows {
    int reader = 0;
    int64_t first_position = 0;
    int count = 0;
  };
  std::vector<Rows> rows;
  for (size_t i = batch.first_part; i < batch.first_part + batch.num_parts; ++i) {
    const std::vector<TokenId>& tokens = request.parts[i].tokens;
    cache_.WriteLayer(plans[i], tokens, layer);
    rows.push_back({static_cast<int>(i), plans[i].first_position, static_cast<int>(tokens.size())});
  }
  cache_.device().compute().Launch([this, layer, rows, q = QueryRows(batch)]() mutable {
    for (const Rows& r : rows) {
      for (int i = 0; i < r.count; ++i) {
        for (int head = 0; head < options_.num_heads; ++head, q += k_dim()) {
          queries_(layer, r.reader, r.first_position + i, head, {q, static_cast<size_t>(k_dim())});
        }
      }
    }
  });
}

absl::Status AttentionRig::RunTurns(const StepRequest& request,
                                    const std::vector<kvcache::WritePlan>& plans,
                                    const std::vector<MicroBatch>& batches, StepOutput* output) {
  const int64_t heads = int64_t{max_rows_} * options_.num_heads;
  float* states = reinterpret_cast<float*>(states_.data());
  const auto state_of = [&](const MicroBatch& batch) -> ops::AttendState {
    const int64_t first_head = int64_t{batch.first_row} * options_.num_heads;
    return {.o = states + first_head * v_dim(),
            .m = states + heads * v_dim() + first_head,
            .l = states + heads * (v_dim() + 1) + first_head};
  };
  const int64_t row_floats = int64_t{options_.num_heads} * v_dim();
  const int num_batches = static_cast<int>(batches.size());
  const int num_turns = options_.cache.num_layers * num_batches;
  for (int turn = 0; turn < num_turns + num_batches; ++turn) {
    const MicroBatch& batch = batches[static_cast<size_t>(turn % num_batches)];
    if (const int attended = turn - num_batches; attended >= 0) {
      RETURN_IF_ERROR(
          hybrid_->EndTurn(attended, QueryRows(batch), state_of(batch), out_.data(), between_));
      const int64_t first_row =
          int64_t{attended / num_batches} * output->num_rows + batch.first_row;
      float* to = output->out.data() + first_row * row_floats;
      const size_t size_bytes = static_cast<size_t>(batch.num_rows * row_floats) * sizeof(float);
      cache_.device().compute().Launch(
          [this, to, size_bytes] { std::memcpy(to, out_.data(), size_bytes); });
    }
    if (turn == request.stop_before_turn) return absl::CancelledError("as the test asks");
    if (turn >= num_turns) continue;
    SubmitDense(request, plans, batch, turn / num_batches);
    hybrid_->BeginTurn(turn, QueryRows(batch), state_of(batch));
  }
  return absl::OkStatus();
}

StepOutput AttentionRig::Run(const StepRequest& request) {
  StepOutput output;
  std::vector<kvcache::WritePlan> plans;
  std::vector<attention::StepSequence> sequences;
  std::vector<int> retained;
  int workspace_used = 0;
  plans.reserve(request.parts.size());
  for (const StepPart& part : request.parts) {
    const int num_tokens = static_cast<int>(part.tokens.size());
    auto plan = cache_.Prepare(part.slot, num_tokens, &workspace_used);
    CHECK(plan.ok()) << plan.status().ToString();
    plans.push_back(*std::move(plan));
    sequences.push_back({.plan = &plans.back(), .first_row = output.num_rows});
    output.num_rows += num_tokens;
  }
  kvcache::InplaceKvCache& cache = cache_.cache();
  const size_t first_parts = request.first_parts > 0 ? request.first_parts : request.parts.size();
  std::vector<MicroBatch> batches;
  std::vector<attention::StepAttention> attention;
  for (size_t first = 0; first < sequences.size(); first += first_parts) {
    const size_t count = batches.empty() ? first_parts : sequences.size() - first;
    attention.push_back(attention::BuildStepAttention(
        cache, std::span(sequences).subspan(first, count), OrderFor(request.share),
        request.retain_keep_free, &retained));
    if (request.plant) request.plant(attention.back());
    batches.push_back({.first_part = first,
                       .num_parts = count,
                       .first_row = attention.back().first_row,
                       .num_rows = attention.back().num_rows});
    if (batches.size() == 2) break;
  }
  output.attention = attention.front();
  output.out.resize(static_cast<size_t>(options_.cache.num_layers) *
                    static_cast<size_t>(output.num_rows * options_.num_heads * v_dim()));
  cache.mutable_blocks().LockRetained(true);
  hybrid_->BeginStep(std::move(attention), request.share);
  output.status = RunTurns(request, plans, batches, &output);
  if (output.status.ok()) {
    auto stats = hybrid_->EndStep(cache_.device().compute().Record());
    output.status = stats.status();
    if (stats.ok()) output.stats = *stats;
  } else {
    hybrid_->CancelStep();
  }
  cache.mutable_blocks().LockRetained(false);
  const bool keep = request.keep && output.status.ok();
  if (!output.status.ok() && !hybrid_->Ok()) {
    // What was submitted writes to the output.
    device::AwaitIdle({&cache_.device().compute()}, "attention rig's output");
    return output;
  }
  for (size_t i = plans.size(); i-- > 0;) {
    if (!keep) cache.AbandonWrite(plans[i]);
  }
  for (size_t i = 0; keep && i < plans.size(); ++i) {
    cache_.Finish(plans[i], request.parts[i].tokens);
  }
  for (const int id : retained) {
    cache.mutable_blocks().FinishRetain(id, /*landed=*/output.status.ok());
  }
  return output;
}

const PlainHead& AttentionRig::HeadOf(int slot, int layer, int kv_head,
                                      const std::vector<TokenId>& tokens) {
  const KvGeometry& kv = options_.cache.geometry;
  KnownHead& known = known_heads_[{slot, layer, kv_head}];
  PlainHead& head = known.head;
  const auto differ =
      std::mismatch(known.tokens.begin(), known.tokens.end(), tokens.begin(), tokens.end());
  const size_t equal = static_cast<size_t>(differ.second - tokens.begin());
  head.k_dim = kv.k_dim;
  head.v_dim = kv.v_dim;
  head.k.resize(equal * static_cast<size_t>(kv.k_dim));
  head.v.resize(equal * static_cast<size_t>(kv.v_dim));
  known.tokens = tokens;
  std::vector<float> k(static_cast<size_t>(kv.k_dim));
  std::vector<float> v(static_cast<size_t>(kv.value_in_key ? 0 : kv.v_dim));
  for (size_t t = equal; t < tokens.size(); ++t) {
    cache_.kv()(layer, kv_head, static_cast<int64_t>(t), tokens[t], k, v);
    for (const float value : k) head.k.push_back(Stored(value, kv.dtype));
    for (const float value : v) head.v.push_back(Stored(value, kv.dtype));
    for (int d = 0; kv.value_in_key && d < kv.v_dim; ++d) {
      head.v.push_back(Stored(k[static_cast<size_t>(d)], kv.dtype));
    }
  }
  return head;
}

std::vector<PlainOutput> AttentionRig::Plain(const StepRequest& request) {
  const int kv_heads = options_.cache.geometry.num_kv_heads;
  const int group = options_.num_heads / kv_heads;
  int num_rows = 0;
  for (const StepPart& part : request.parts) num_rows += static_cast<int>(part.tokens.size());
  std::vector<PlainOutput> outputs(
      static_cast<size_t>(options_.cache.num_layers * num_rows * options_.num_heads));
  std::vector<float> q(static_cast<size_t>(k_dim()));
  for (int layer = 0; layer < options_.cache.num_layers; ++layer) {
    int row = 0;
    for (size_t reader = 0; reader < request.parts.size(); ++reader) {
      const StepPart& part = request.parts[reader];
      std::vector<TokenId> tokens = cache_.tokens(part.slot);
      const int64_t length = static_cast<int64_t>(tokens.size());
      tokens.insert(tokens.end(), part.tokens.begin(), part.tokens.end());
      for (int kv_head = 0; kv_head < kv_heads; ++kv_head) {
        const PlainHead& plain_head = HeadOf(part.slot, layer, kv_head, tokens);
        for (size_t i = 0; i < part.tokens.size(); ++i) {
          const int64_t position = length + static_cast<int64_t>(i);
          for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
            queries_(layer, static_cast<int>(reader), position, head, q);
            const size_t at = static_cast<size_t>(
                (layer * num_rows + row + static_cast<int>(i)) * options_.num_heads + head);
            outputs[at] = AttendPlain(plain_head, position + 1, q);
          }
        }
      }
      row += static_cast<int>(part.tokens.size());
    }
  }
  return outputs;
}

AttentionRig::Worst AttentionRig::Compare(const StepOutput& output,
                                          const std::vector<PlainOutput>& plain) const {
  Worst worst;
  CHECK_EQ(output.out.size(), plain.size() * static_cast<size_t>(v_dim()));
  for (size_t i = 0; i < plain.size(); ++i) {
    for (int d = 0; d < v_dim(); ++d) {
      const float got = output.out[i * static_cast<size_t>(v_dim()) + static_cast<size_t>(d)];
      const double want = plain[i].out[static_cast<size_t>(d)];
      double ratio = std::fabs(got - want) / plain[i].tolerance;
      if (std::isnan(ratio)) ratio = std::numeric_limits<double>::infinity();
      if (ratio <= worst.ratio) continue;
      worst.ratio = ratio;
      const int at = static_cast<int>(i);
      worst.where = absl::StrCat("layer ", at / (output.num_rows * options_.num_heads), ", row ",
                                 at / options_.num_heads % output.num_rows, ", head ",
                                 at % options_.num_heads, ", dim ", d, ": ", got, " instead of ",
                                 want, ", tolerance ", plain[i].tolerance);
    }
  }
  return worst;
}

}  // namespace writescope::testing
