// Queries, keys and values from projection to output, against causal attention in double.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "engine/kernels/attention_partial.h"
#include "engine/kernels/elementwise.h"
#include "engine/kernels/kv_write.h"
#include "tests/engine/ops/ops_rig.h"
#include "tests/support/seed.h"

namespace writescope::ops {
namespace {

using testing_support::TestSeed;

double Dot(const std::vector<double>& a, const std::vector<double>& b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

struct GqaCase {
  int num_heads, num_kv_heads, head_dim, rope_dim;
  bool normed;
  std::vector<int> chunks;  // Tokens of each prefill chunk, in order.
};

class GqaProblem {
 public:
  GqaProblem(const GqaCase& c, std::mt19937_64& rng)
      : c_(c), num_tokens_(std::accumulate(c.chunks.begin(), c.chunks.end(), 0)) {
    q_ = Bf16Values(int64_t{num_tokens_} * c.num_heads * c.head_dim, 1, rng);
    k_ = Bf16Values(int64_t{num_tokens_} * c.num_kv_heads * c.head_dim, 1, rng);
    v_ = Bf16Values(int64_t{num_tokens_} * c.num_kv_heads * c.head_dim, 1, rng);
    q_norm_ = Bf16Values(c.head_dim, 1, rng);
    k_norm_ = Bf16Values(c.head_dim, 1, rng);
    inv_freq_ = InverseFrequencies(c.rope_dim / 2);
  }

  KvGeometry Geometry(KvDtype dtype) const {
    return {.num_kv_heads = c_.num_kv_heads,
            .k_dim = PadDim(c_.head_dim),
            .v_dim = PadDim(c_.head_dim),
            .value_in_key = false,
            .dtype = dtype};
  }

  // Outputs [num_tokens, num_heads, head_dim] of all chunks.
  std::vector<float> Run(int num_threads, KvDtype dtype) const {
    OpsRig rig(num_threads, {.max_tokens = num_tokens_,
                             .hidden = 64,
                             .max_mlp_width = 64,
                             .num_experts = 0,
                             .experts_per_token = 0,
                             .num_heads = c_.num_heads,
                             .max_head_dim = c_.head_dim});
    const KvGeometry kv = Geometry(dtype);
    const int num_blocks = static_cast<int>(CeilDiv(num_tokens_, kBlockTokens));
    std::byte* blocks = rig.Allocate(num_blocks * kv.block_bytes());
    const float* q_norm = rig.Upload(q_norm_);
    const float* k_norm = rig.Upload(k_norm_);
    const float* inv_freq = rig.Upload(inv_freq_);
    float* q_out = rig.Floats(int64_t{num_tokens_} * c_.num_heads * kv.k_dim);
    const AttendState state = MakeState(rig, num_tokens_, c_.num_heads, kv.v_dim);
    const int64_t out_floats = int64_t{c_.num_heads} * c_.head_dim;
    float* out = rig.Floats(num_tokens_ * out_floats);
    int first = 0;
    for (const int count : c_.chunks) {
      std::vector<int64_t> positions(count);
      std::vector<KvTarget> targets(count);
      for (int i = 0; i < count; ++i) {
        positions[i] = first + i;
        targets[i] = {.block = blocks + (first + i) / kBlockTokens * kv.block_bytes(),
                      .slot = (first + i) % kBlockTokens};
      }
      const int64_t kv_floats = int64_t{c_.num_kv_heads} * c_.head_dim;
      rig.ops().GqaPrepare({.num_tokens = count,
                            .num_heads = c_.num_heads,
                            .head_dim = c_.head_dim,
                            .kv = kv,
                            .q = rig.Upload(Slice(q_, first * out_floats, count * out_floats)),
                            .k = rig.Upload(Slice(k_, first * kv_floats, count * kv_floats)),
                            .v = rig.Upload(Slice(v_, first * kv_floats, count * kv_floats)),
                            .q_norm = c_.normed ? q_norm : nullptr,
                            .k_norm = c_.normed ? k_norm : nullptr,
                            .norm_eps = 1e-6f,
                            .rope = {inv_freq, c_.rope_dim, 1.0f},
                            .scale_log2 = Scale(),
                            .positions = positions,
                            .targets = targets,
                            .q_out = q_out});
      // All blocks so far, the full ones apart from the last.
      const int total = first + count;
      const int full = total / kBlockTokens;
      std::vector<AttendSpan> spans;
      if (full > 0) {
        spans.push_back({.base = blocks,
                         .num_blocks = full,
                         .num_tokens = int64_t{full} * kBlockTokens,
                         .first_position = 0,
                         .first_reader = 0,
                         .num_readers = 1});
      }
      if (total % kBlockTokens != 0) {
        spans.push_back({.base = blocks + full * kv.block_bytes(),
                         .num_blocks = 1,
                         .num_tokens = total % kBlockTokens,
                         .first_position = int64_t{full} * kBlockTokens,
                         .first_reader = 0,
                         .num_readers = 1});
      }
      const std::vector<int> readers = {0};
      const std::vector<ReaderRows> rows = {{0, count, first}};
      rig.ops().ResetAttention(count, c_.num_heads, kv.v_dim, state);
      rig.ops().Attend({.kv = kv,
                        .num_heads = c_.num_heads,
                        .q = q_out,
                        .spans = spans,
                        .readers = readers,
                        .rows = rows,
                        .state = state});
      rig.ops().MergeAttention({.kv = kv,
                                .num_rows = count,
                                .num_heads = c_.num_heads,
                                .out_dim = c_.head_dim,
                                .state = state,
                                .cpu_out = nullptr,
                                .cpu_lse = nullptr,
                                .out = out + first * out_floats});
      first = total;
    }
    return rig.Download(out, num_tokens_ * out_floats);
  }

  std::vector<double> Want() const {
    std::vector<double> want;
    for (int t = 0; t < num_tokens_; ++t) {
      for (int h = 0; h < c_.num_heads; ++h) {
        const int kv_head = h / (c_.num_heads / c_.num_kv_heads);
        const std::vector<double> q = Prepared(q_, t, h, c_.num_heads, q_norm_);
        std::vector<double> scores(t + 1);
        std::vector<std::vector<double>> values(t + 1);
        for (int s = 0; s <= t; ++s) {
          scores[s] =
              Dot(q, Prepared(k_, s, kv_head, c_.num_kv_heads, k_norm_)) / std::sqrt(c_.head_dim);
          const auto v = v_.begin() + (s * c_.num_kv_heads + kv_head) * c_.head_dim;
          values[s].assign(v, v + c_.head_dim);
        }
        const std::vector<double> out = PlainSoftmax(scores, t + 1, values);
        want.insert(want.end(), out.begin(), out.end());
      }
    }
    return want;
  }

 private:
  float Scale() const { return static_cast<float>(kLog2E / std::sqrt(c_.head_dim)); }
  static std::vector<float> Slice(const std::vector<float>& values, int64_t first, int64_t count) {
    return {values.begin() + first, values.begin() + first + count};
  }
  // Norm and rope of one head of one token.
  std::vector<double> Prepared(const std::vector<float>& all, int token, int head, int num_heads,
                               const std::vector<float>& norm) const {
    const int dim = c_.head_dim;
    std::vector<float> x(all.begin() + (token * num_heads + head) * dim,
                         all.begin() + (token * num_heads + head + 1) * dim);
    if (c_.normed) {
      std::vector<double> normed(dim);
      kernels::RmsNormRowRef(dim, x.data(), norm.data(), 1e-6f, normed.data());
      x.assign(normed.begin(), normed.end());
    }
    std::vector<double> out(x.begin(), x.end());
    kernels::RopeRowRef(token, c_.rope_dim / 2, inv_freq_.data(), 1.0f, x.data(), out.data());
    return out;
  }

  GqaCase c_;
  int num_tokens_;
  std::vector<float> q_, k_, v_, q_norm_, k_norm_, inv_freq_;
};

TEST(CpuOpsGqa, ChunkedPrefillAndDecodeMatchCausalAttention) {
  std::mt19937_64 rng(TestSeed());
  // Chunks that end before, at and after block borders, single tokens (decode), odd dims and
  // groups.
  for (const GqaCase& c :
       {GqaCase{4, 2, 16, 16, false, {5, 1, 1, 70, 1}}, GqaCase{6, 1, 32, 32, true, {64, 64, 1, 3}},
        GqaCase{8, 2, 64, 32, true, {1, 63, 1, 150}}, GqaCase{3, 3, 128, 128, false, {100, 1}}}) {
    const GqaProblem problem(c, rng);
    const std::vector<double> want = problem.Want();
    for (const KvDtype dtype : {KvDtype::kF32, KvDtype::kBf16}) {
      const std::vector<float> got =
          SameForAnyThreads([&](int num_threads) { return problem.Run(num_threads, dtype); });
      // bf16 keys and values are off by up to 2^-9 of themselves: scores of |q||k| about 10 by a
      // percent, values of up to 4 by as much.
      ExpectNear(got, want, dtype == KvDtype::kF32 ? 2e-5 : 0.1);
    }
  }
}

// Several sequences at once, a prefix that two of them share, spans in any order.
class SharedSpans : public testing::Test {
 protected:
  static constexpr int kHeads = 6, kKvHeads = 2, kDim = 32;
  static constexpr int kPrefixTokens = 192;
  const KvGeometry kv_{.num_kv_heads = kKvHeads,
                       .k_dim = kDim,
                       .v_dim = kDim,
                       .value_in_key = false,
                       .dtype = KvDtype::kF32};

  // Reader r: whether it has the prefix, how many tokens of its own, and how many of them are rows.
  struct Sequence {
    bool has_prefix;
    int own_tokens;
    int num_rows;
    int64_t first_position() const { return has_prefix ? kPrefixTokens : 0; }
  };
  const std::vector<Sequence> sequences_ = {
      {true, 10, 10}, {false, 130, 1}, {true, 65, 1}, {false, 64, 3}};

  void SetUp() override {
    std::mt19937_64 rng(TestSeed());
    prefix_k_ = Bf16Values(kPrefixTokens * kKvHeads * kDim, 1, rng);
    prefix_v_ = Bf16Values(kPrefixTokens * kKvHeads * kDim, 1, rng);
    for (const Sequence& s : sequences_) {
      own_k_.push_back(Bf16Values(s.own_tokens * kKvHeads * kDim, 1, rng));
      own_v_.push_back(Bf16Values(s.own_tokens * kKvHeads * kDim, 1, rng));
      num_rows_ += s.num_rows;
    }
    q_ = Bf16Values(num_rows_ * kHeads * kDim, 0.3f, rng);
  }

  std::byte* WriteBlocks(OpsRig& rig, const std::vector<float>& k, const std::vector<float>& v) {
    const int num_tokens = static_cast<int>(k.size()) / (kKvHeads * kDim);
    std::byte* base = rig.Allocate(CeilDiv(num_tokens, kBlockTokens) * kv_.block_bytes());
    for (int t = 0; t < num_tokens; ++t) {
      for (int h = 0; h < kKvHeads; ++h) {
        std::byte* head = base + t / kBlockTokens * kv_.block_bytes() + h * kv_.head_bytes();
        const int64_t at = (t * kKvHeads + h) * kDim;
        kernels::WriteKey(t % kBlockTokens, kDim, kDim, kv_.dtype, &k[at], head);
        kernels::WriteValue(t % kBlockTokens, kDim, kDim, kv_.dtype, &v[at],
                            head + kv_.k_plane_bytes());
      }
    }
    return base;
  }

  // The finished outputs, [num_rows, heads, dim]; part of the spans may be left to a "CPU side"
  // that computed its partials elsewhere.
  std::vector<float> Run(int num_threads, bool own_spans_first) {
    OpsRig rig(num_threads, {.max_tokens = num_rows_,
                             .hidden = 64,
                             .max_mlp_width = 64,
                             .num_experts = 0,
                             .experts_per_token = 0,
                             .num_heads = kHeads,
                             .max_head_dim = kDim});
    std::vector<int> readers;
    std::vector<ReaderRows> rows;
    std::vector<AttendSpan> spans;
    int first_row = 0;
    for (size_t i = 0; i < sequences_.size(); ++i) {
      const Sequence& s = sequences_[i];
      const int first_new = s.own_tokens - s.num_rows;
      rows.push_back({first_row, s.num_rows, s.first_position() + first_new});
      first_row += s.num_rows;
      spans.push_back({.base = WriteBlocks(rig, own_k_[i], own_v_[i]),
                       .num_blocks = static_cast<int>(CeilDiv(s.own_tokens, kBlockTokens)),
                       .num_tokens = s.own_tokens,
                       .first_position = s.first_position(),
                       .first_reader = static_cast<int>(readers.size()),
                       .num_readers = 1});
      readers.push_back(static_cast<int>(i));
    }
    const int first_shared = static_cast<int>(readers.size());
    for (size_t i = 0; i < sequences_.size(); ++i) {
      if (sequences_[i].has_prefix) readers.push_back(static_cast<int>(i));
    }
    const AttendSpan prefix = {.base = WriteBlocks(rig, prefix_k_, prefix_v_),
                               .num_blocks = kPrefixTokens / kBlockTokens,
                               .num_tokens = kPrefixTokens,
                               .first_position = 0,
                               .first_reader = first_shared,
                               .num_readers = static_cast<int>(readers.size()) - first_shared};
    spans.insert(own_spans_first ? spans.end() : spans.begin(), prefix);
    const AttendState state = MakeState(rig, num_rows_, kHeads, kDim);
    rig.ops().ResetAttention(num_rows_, kHeads, kDim, state);
    rig.ops().Attend({.kv = kv_,
                      .num_heads = kHeads,
                      .q = rig.Upload(q_),
                      .spans = spans,
                      .readers = readers,
                      .rows = rows,
                      .state = state});
    float* out = rig.Floats(num_rows_ * kHeads * kDim);
    rig.ops().MergeAttention({.kv = kv_,
                              .num_rows = num_rows_,
                              .num_heads = kHeads,
                              .out_dim = kDim,
                              .state = state,
                              .cpu_out = nullptr,
                              .cpu_lse = nullptr,
                              .out = out});
    return rig.Download(out, num_rows_ * kHeads * kDim);
  }

  std::vector<double> Want() const {
    std::vector<double> want;
    int row = 0;
    for (size_t i = 0; i < sequences_.size(); ++i) {
      const Sequence& s = sequences_[i];
      std::vector<float> k = s.has_prefix ? prefix_k_ : std::vector<float>();
      std::vector<float> v = s.has_prefix ? prefix_v_ : std::vector<float>();
      k.insert(k.end(), own_k_[i].begin(), own_k_[i].end());
      v.insert(v.end(), own_v_[i].begin(), own_v_[i].end());
      const int total = static_cast<int>(k.size()) / (kKvHeads * kDim);
      for (int r = 0; r < s.num_rows; ++r, ++row) {
        const int seen = total - s.num_rows + r + 1;
        for (int h = 0; h < kHeads; ++h) {
          const auto q = q_.begin() + (row * kHeads + h) * kDim;
          std::vector<double> scores(total);
          std::vector<std::vector<double>> values(total);
          for (int t = 0; t < total; ++t) {
            const int64_t at = (t * kKvHeads + h / (kHeads / kKvHeads)) * kDim;
            scores[t] = std::inner_product(q, q + kDim, k.begin() + at, 0.0) / kLog2E;
            values[t].assign(v.begin() + at, v.begin() + at + kDim);
          }
          const std::vector<double> out = PlainSoftmax(scores, seen, values);
          want.insert(want.end(), out.begin(), out.end());
        }
      }
    }
    return want;
  }

  int num_rows_ = 0;
  std::vector<float> q_, prefix_k_, prefix_v_;
  std::vector<std::vector<float>> own_k_, own_v_;
};

TEST_F(SharedSpans, EveryReaderSeesItsOwnTokensAndThePrefixOnce) {
  const std::vector<double> want = Want();
  for (const bool own_spans_first : {false, true}) {
    ExpectNear(
        SameForAnyThreads([&](int num_threads) { return Run(num_threads, own_spans_first); }), want,
        1e-5);
  }
}

TEST(CpuOpsMerge, TakesThePartialsOfTheCpuAndLeavesThemEmpty) {
  constexpr int kRows = 3, kHeads = 2, kVDim = 32, kOutDim = 20;
  std::mt19937_64 rng(TestSeed());
  OpsRig rig(1, {.max_tokens = kRows,
                 .hidden = 64,
                 .max_mlp_width = 64,
                 .num_experts = 0,
                 .experts_per_token = 0,
                 .num_heads = kHeads,
                 .max_head_dim = kOutDim});
  const KvGeometry kv{.num_kv_heads = 1,
                      .k_dim = 32,
                      .v_dim = kVDim,
                      .value_in_key = false,
                      .dtype = KvDtype::kBf16};
  const std::vector<float> o = Bf16Values(kRows * kHeads * kVDim, 1, rng);
  const float empty = kernels::kEmptyLse;
  // The device's side is empty in row 0, the CPU's in row 1.
  const std::vector<float> m = {empty, empty, 0, 1, 2, 3};
  const std::vector<float> l = {0, 0, 1, 2, 3, 4};
  std::vector<float> cpu_lse = {1, 2, empty, empty, 2, -1};
  const std::vector<float> cpu_out = Bf16Values(kRows * kHeads * kVDim, 1, rng);
  const std::vector<float> cpu_lse_before = cpu_lse;
  float* out = rig.Floats(kRows * kHeads * kOutDim);
  rig.ops().MergeAttention({.kv = kv,
                            .num_rows = kRows,
                            .num_heads = kHeads,
                            .out_dim = kOutDim,
                            .state = {rig.Upload(o), rig.Upload(m), rig.Upload(l)},
                            .cpu_out = cpu_out.data(),
                            .cpu_lse = cpu_lse.data(),
                            .out = out});
  const std::vector<float> got = rig.Download(out, kRows * kHeads * kOutDim);
  for (int i = 0; i < kRows * kHeads; ++i) {
    EXPECT_EQ(cpu_lse[i], empty);
    const double device_weight = l[i] == 0 ? 0 : l[i] * std::exp2(m[i]);
    const double cpu_weight = std::exp2(cpu_lse_before[i]);
    for (int d = 0; d < kOutDim; ++d) {
      const double device_part = l[i] == 0 ? 0 : o[i * kVDim + d] / l[i] * device_weight;
      const double want =
          (device_part + cpu_weight * cpu_out[i * kVDim + d]) / (device_weight + cpu_weight);
      EXPECT_NEAR(got[i * kOutDim + d], want, 1e-5) << i << ", " << d;
    }
  }
}

}  // namespace
}  // namespace writescope::ops
