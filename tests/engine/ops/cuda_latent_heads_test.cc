// Prompts of MLA with keys and values of heads made of the latents, on the GPU, against the CPU
// device's attention to the latents themselves in float32.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "tests/engine/ops/cuda_ops_rig.h"
#include "tests/support/gpu.h"
#include "tests/support/seed.h"

namespace writescope::ops {
namespace {

using testing_support::TestSeed;

constexpr int kNope = 128, kRope = 64, kLatent = 512, kValue = 128;
constexpr int kHeadDim = kNope + kRope;

// Sequences of whole prompts, of which the last rows attend.
struct Sequence {
  int num_tokens;
  int num_rows;
};

class LatentProblem {
 public:
  LatentProblem(int num_heads, std::vector<Sequence> sequences, float score_sigma, uint64_t seed)
      : num_heads_(num_heads), sequences_(std::move(sequences)) {
    std::mt19937_64 rng(seed);
    for (const Sequence& s : sequences_) num_tokens_ += s.num_tokens;
    q_ = Bf16Values(num_tokens_ * num_heads * kHeadDim, score_sigma, rng);
    kv_a_ = Bf16Values(num_tokens_ * (kLatent + kRope), 1, rng);
    kv_norm_ = Bf16Values(kLatent, 0.2f, rng);
    for (float& value : kv_norm_) value += 1;
    const float sigma = 1 / std::sqrt(static_cast<float>(kLatent));
    for (int h = 0; h < num_heads; ++h) {
      key_up_.push_back(Bf16Values(kLatent * kNope, sigma, rng));
      value_up_.push_back(Bf16Values(kValue * kLatent, sigma, rng));
    }
  }

  OpsLimits limits() const {
    return {.max_tokens = num_tokens_,
            .hidden = 64,
            .max_mlp_width = 64,
            .num_heads = num_heads_,
            .max_head_dim = kLatent + kRope};
  }
  KvGeometry kv() const {
    return {.num_kv_heads = 1,
            .k_dim = kLatent + kRope,
            .v_dim = kLatent,
            .value_in_key = true,
            .dtype = KvDtype::kBf16};
  }

  // Outputs [tokens, num_heads, kValue], zero for tokens that do not attend. Spans have
  // `span_blocks` blocks, each call takes `call_spans` of them, the last ones first, and a
  // sequence's rows are those of `num_readers` readers.
  struct Cut {
    int span_blocks = 1000;
    int call_spans = 1000;
    int num_readers = 1;
  };
  template <typename Rig>
  std::vector<float> Run(Rig& rig, bool with_heads, const Cut& cut, bool lose_token = false) const {
    std::vector<Matrix> key_up, value_up;
    LoadMatrices(rig, &key_up, &value_up);
    const LatentHeads heads = {.key_up = key_up, .value_up = value_up, .rope_dim = kRope};
    if (with_heads) {
      EXPECT_LE(rig.ops().LatentHeadsMinRows(kv(), heads), 256);
    }
    const int64_t rows = num_tokens_;
    std::vector<std::byte*> blocks;  // Of each sequence
    auto* q_out = rig.Floats(rows * num_heads_ * (kLatent + kRope));
    Prepare(rig, heads, with_heads, q_out, &blocks);
    AttendState state = {.o = rig.Floats(rows * num_heads_ * kLatent),
                         .m = rig.Floats(rows * num_heads_),
                         .l = rig.Floats(rows * num_heads_),
                         .heads = with_heads ? &heads : nullptr};
    rig.ops().ResetAttention(static_cast<int>(rows), num_heads_, with_heads ? kValue : kLatent,
                             state);
    std::vector<AttendSpan> spans;
    std::vector<int> readers;
    std::vector<ReaderRows> reader_rows;
    int first_token = 0;
    for (size_t s = 0; s < sequences_.size(); ++s) {
      const Sequence& sequence = sequences_[s];
      const int first_reader = static_cast<int>(reader_rows.size());
      for (int i = 0; i < cut.num_readers; ++i) {
        const int begin = sequence.num_rows * i / cut.num_readers;
        const int end = sequence.num_rows * (i + 1) / cut.num_readers;
        const int position = sequence.num_tokens - sequence.num_rows + begin;
        if (begin == end) continue;
        reader_rows.push_back({.first_row = first_token + position,
                               .num_rows = end - begin,
                               .first_position = position});
      }
      first_token += sequence.num_tokens;
      const int tokens = sequence.num_tokens - (lose_token ? 1 : 0);
      for (int first = 0; first < tokens; first += cut.span_blocks * kBlockTokens) {
        const int count = std::min(cut.span_blocks * kBlockTokens, tokens - first);
        spans.push_back({.base = blocks[s] + first / kBlockTokens * kv().block_bytes(),
                         .num_blocks = static_cast<int>(CeilDiv(count, kBlockTokens)),
                         .num_tokens = count,
                         .first_position = first,
                         .first_reader = static_cast<int>(readers.size()),
                         .num_readers = static_cast<int>(reader_rows.size()) - first_reader});
        for (int r = first_reader; r < static_cast<int>(reader_rows.size()); ++r) {
          readers.push_back(r);
        }
      }
    }
    std::reverse(spans.begin(), spans.end());
    for (size_t first = 0; first < spans.size(); first += static_cast<size_t>(cut.call_spans)) {
      const size_t count = std::min(spans.size() - first, static_cast<size_t>(cut.call_spans));
      rig.ops().Attend({.kv = kv(),
                        .num_heads = num_heads_,
                        .q = q_out,
                        .spans = std::span(spans).subspan(first, count),
                        .readers = readers,
                        .rows = reader_rows,
                        .state = state});
    }
    void* merged = Output(rig, rows * num_heads_ * kLatent);
    rig.ops().MergeAttention({.kv = kv(),
                              .num_rows = static_cast<int>(rows),
                              .num_heads = num_heads_,
                              .out_dim = kLatent,
                              .state = state,
                              .out = merged});
    if (with_heads) return ValuesOf(rig, merged, rows * num_heads_ * kValue);
    void* out = Output(rig, rows * num_heads_ * kValue);
    rig.ops().MlaOutput(static_cast<int>(rows), value_up, merged, out);
    return ValuesOf(rig, out, rows * num_heads_ * kValue);
  }

 private:
  // Heads' matrices lie as a model's do: key and value of a head, then of the next one.
  template <typename Rig>
  void LoadMatrices(Rig& rig, std::vector<Matrix>* key_up, std::vector<Matrix>* value_up) const {
    const auto bytes = [&](int64_t rows, int64_t cols) {
      return rig.ops().footprint().matrix_bytes(WeightType::kBf16, WeightFormat::kSource, rows,
                                                cols);
    };
    const auto load = [&](std::byte* to, const std::vector<float>& values, int64_t rows) {
      std::vector<uint16_t> halves;
      for (const float value : values) halves.push_back(FloatToBf16(value));
      const int64_t cols = static_cast<int64_t>(values.size()) / rows;
      return *rig.ops().LoadMatrix(to, WeightType::kBf16, WeightFormat::kSource, rows, cols,
                                   reinterpret_cast<const std::byte*>(halves.data()));
    };
    const int64_t key_bytes = bytes(kLatent, kNope), value_bytes = bytes(kValue, kLatent);
    std::byte* at = rig.Allocate(num_heads_ * (key_bytes + value_bytes));
    for (int h = 0; h < num_heads_; ++h) {
      key_up->push_back(load(at, key_up_[static_cast<size_t>(h)], kLatent));
      value_up->push_back(load(at + key_bytes, value_up_[static_cast<size_t>(h)], kValue));
      at += key_bytes + value_bytes;
    }
  }

  template <typename Rig>
  void Prepare(Rig& rig, const LatentHeads& heads, bool with_heads, float* q_out,
               std::vector<std::byte*>* blocks) const {
    std::vector<int64_t> positions;
    std::vector<KvTarget> targets;
    for (const Sequence& s : sequences_) {
      blocks->push_back(rig.Allocate(CeilDiv(s.num_tokens, kBlockTokens) * kv().block_bytes()));
      for (int t = 0; t < s.num_tokens; ++t) {
        positions.push_back(t);
        targets.push_back(
            {blocks->back() + t / kBlockTokens * kv().block_bytes(), t % kBlockTokens});
      }
    }
    std::vector<float> inv_freq = InverseFrequencies(kRope / 2);
    rig.ops().MlaPrepare(
        {.num_tokens = num_tokens_,
         .num_heads = num_heads_,
         .nope_dim = kNope,
         .rope_dim = kRope,
         .latent_dim = kLatent,
         .kv = kv(),
         .q = rig.Upload(q_),
         .kv_a = rig.Upload(kv_a_),
         .kv_norm = Vector(rig, kv_norm_),
         .norm_eps = 1e-6f,
         .rope = {Vector(rig, inv_freq), kRope, 1.0f},
         .scale_log2 = static_cast<float>(kLog2E / std::sqrt(static_cast<double>(kHeadDim))),
         .key_up = heads.key_up,
         .positions = positions,
         .targets = targets,
         .absorb = !with_heads,
         .q_out = q_out});
  }

  const int num_heads_;
  const std::vector<Sequence> sequences_;
  int num_tokens_ = 0;
  std::vector<float> q_, kv_a_, kv_norm_;
  std::vector<std::vector<float>> key_up_, value_up_;
};

double Rms(const std::vector<float>& values) {
  double sum = 0;
  for (const float value : values) sum += double{value} * value;
  return std::sqrt(sum / static_cast<double>(values.size()));
}

std::vector<float> Difference(std::vector<float> a, const std::vector<float>& b) {
  for (size_t i = 0; i < a.size(); ++i) a[i] -= b[i];
  return a;
}

double Largest(const std::vector<float>& values) {
  double largest = 0;
  for (const float value : values) {
    // A NaN is larger than all.
    if (!(std::fabs(value) <= largest)) largest = std::fabs(double{value});
  }
  return largest;
}

// Keys, values, queries, weights and the result are rounded to bf16, by 2^-9 of themselves at most
// and independently, and so are latents' products: some 2e-3 of what is attended to in the mean. A
// row of few tokens is off by that of their values, which are about 1.
constexpr double kRmsBound = 6e-3;
constexpr double kLargestBound = 0.04;

class CudaLatentHeadsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    SKIP_WITHOUT_GPU();
    CudaRig probe({.max_tokens = 1, .hidden = 64, .num_heads = 1, .max_head_dim = 64}, {});
    if (probe.device().info().compute_major != 9) GTEST_SKIP() << "for compute capability 9.0";
  }

  static void Check(const std::vector<float>& got, const std::vector<float>& want) {
    const std::vector<float> error = Difference(got, want);
    EXPECT_LE(Rms(error), kRmsBound * Rms(want));
    EXPECT_LE(Largest(error), kLargestBound);
  }
};

TEST_F(CudaLatentHeadsTest, MatchesAttentionToLatentsForAnyCut) {
  for (const float sigma : {0.3f, 2.0f}) {
    if (testing::LeftOut(sigma < 1)) continue;
    const std::vector<Sequence> small = {{200, 100}, {64, 1}};
    const std::vector<Sequence> all = {{700, 300}, {333, 333}, {64, 1}};
    const LatentProblem problem(16, testing::SmallSizes() ? small : all, sigma, TestSeed());
    OpsRig cpu(4, problem.limits());
    const std::vector<float> want = problem.Run(cpu, false, {});
    CudaRig cuda(problem.limits(), {.compute = ComputeType::kBf16});
    if (!testing::SmallSizes()) Check(problem.Run(cuda, false, {}), want);
    const std::vector<float> whole = problem.Run(cuda, true, {});
    Check(whole, want);
    if (!testing::SmallSizes()) {
      EXPECT_EQ(problem.Run(cuda, true, {}), whole) << "differs between runs";
    }
    for (const LatentProblem::Cut& cut :
         {LatentProblem::Cut{1}, {3, 1}, {2, 4}, {1000, 1000, 7}, {2, 3, 2}}) {
      if (testing::LeftOut(cut.num_readers == 2)) continue;
      const std::vector<float> got = problem.Run(cuda, true, cut);
      Check(got, want);
      EXPECT_LE(Rms(Difference(got, whole)), kRmsBound * Rms(want));
    }
  }
}

// More blocks, as often as they are read, than there is room for at once.
TEST_F(CudaLatentHeadsTest, ManyReadersTakeSeveralPasses) {
  const LatentProblem problem(16, {{1930, 200}}, 1, TestSeed());
  OpsRig cpu(4, problem.limits());
  const std::vector<float> want = problem.Run(cpu, false, {});
  CudaRig cuda(problem.limits(), {.compute = ComputeType::kBf16});
  Check(problem.Run(cuda, true, {.num_readers = 20}), want);
}

// The planted bug: a row does not see its own token.
TEST_F(CudaLatentHeadsTest, ALostTokenIsSeen) {
  const LatentProblem problem(16, {{500, 1}}, 0.3f, TestSeed());
  CudaRig cuda(problem.limits(), {.compute = ComputeType::kBf16});
  const std::vector<float> whole = problem.Run(cuda, true, {});
  const std::vector<float> less = problem.Run(cuda, true, {}, /*lose_token=*/true);
  EXPECT_GT(Rms(Difference(less, whole)), 2 * kRmsBound * Rms(whole));
}

TEST_F(CudaLatentHeadsTest, WarmsUpAndRefusesOtherShapes) {
  const LatentProblem problem(16, {{64, 64}}, 1, TestSeed());
  CudaRig cuda(problem.limits(), {.compute = ComputeType::kBf16});
  problem.Run(cuda, true, {});
  EXPECT_TRUE(cuda.ops().WarmUp(problem.kv(), 16).ok());
  const std::vector<Matrix> key_up(16, {nullptr, WeightType::kBf16, 64, 32});
  const std::vector<Matrix> value_up(16, {nullptr, WeightType::kBf16, 32, 64});
  const LatentHeads small = {.key_up = key_up, .value_up = value_up, .rope_dim = 32};
  const KvGeometry kv = {
      .num_kv_heads = 1, .k_dim = 96, .v_dim = 64, .value_in_key = true, .dtype = KvDtype::kBf16};
  EXPECT_GT(cuda.ops().LatentHeadsMinRows(kv, small), 1 << 20);
}

}  // namespace
}  // namespace writescope::ops
