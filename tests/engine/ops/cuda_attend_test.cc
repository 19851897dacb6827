// Attention on the GPU against the double twin, in the layers of the CPU kernels' tests: needles,
// flat scores, random scores, and that any cut equals no cut.
#include "engine/ops/cuda/cuda_attend.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <thread>

#include "engine/base/bf16.h"
#include "engine/kernels/attention_partial.h"
#include "tests/engine/ops/cuda_attend_rig.h"
#include "tests/support/gpu.h"
#include "tests/support/seed.h"

namespace writescope::ops {
namespace {

using testing_support::TestSeed;

struct Geometry {
  int num_kv_heads;
  int group;
  int k_dim;
  int v_dim;
  bool value_in_key = false;
};

// Every kernel, groups that fill a panel and that do not, and more heads than a panel has.
constexpr Geometry kGeometries[] = {
    {2, 1, 32, 32},          {2, 2, 64, 64},          {1, 6, 96, 96},       {4, 8, 128, 128},
    {2, 4, 128, 128},        {1, 8, 192, 128},        {1, 16, 128, 128},    {1, 20, 64, 64},
    {1, 16, 576, 512, true}, {1, 40, 576, 512, true}, {1, 4, 32, 32, true}, {2, 3, 160, 96}};

// No kernel with matrix instructions takes it.
bool IsForPlainKernel(const Geometry& g) {
  return g.k_dim == 160 || (g.value_in_key && g.k_dim == 32);
}

KvGeometry KvOf(const Geometry& g, KvDtype dtype = KvDtype::kBf16) {
  return {.num_kv_heads = g.num_kv_heads,
          .k_dim = g.k_dim,
          .v_dim = g.v_dim,
          .value_in_key = g.value_in_key,
          .dtype = dtype};
}

// bf16 weights are off by 2^-9 of themselves, twice where slices meet; values and queries are
// exact.
double RandomBound(const SceneAnswer& answer, size_t i) {
  return 0x1p-8 * (answer.abs_sum[i] + std::fabs(answer.out[i])) + 1e-6;
}

// All spans in calls that are cut at random.
std::vector<std::vector<int>> RandomCalls(const Scene& scene, std::mt19937_64& rng) {
  std::vector<int> order(scene.spans.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
  std::shuffle(order.begin(), order.end(), rng);
  std::vector<std::vector<int>> calls;
  for (size_t i = 0; i < order.size();) {
    const size_t count = std::min<size_t>(order.size() - i, 1 + rng() % 5);
    calls.emplace_back(order.begin() + i, order.begin() + i + count);
    i += count;
  }
  return calls;
}

class CudaAttendTest : public ::testing::Test {
 protected:
  static void TearDownTestSuite() { rig_.reset(); }
  CudaAttendRig& rig() {
    if (rig_ == nullptr) rig_ = std::make_unique<CudaAttendRig>();
    return *rig_;
  }
  std::mt19937_64 rng_{TestSeed()};

  void CheckScene(const SceneShape& shape) {
    const Scene scene = RandomScene(shape, rng_);
    const SceneAnswer answer = AnswerScene(scene);
    const auto bound = [&](size_t i) { return RandomBound(answer, i); };
    rig().Load(scene);
    for (const bool force_simt : {false, true}) {
      // The plain kernel is the same for all shapes, and runs for 160/96 in any case.
      if (testing::LeftOut(!force_simt)) continue;
      SCOPED_TRACE(force_simt ? "simt" : "tensor cores");
      const std::vector<float> whole = rig().RunAtOnce(scene, force_simt);
      EXPECT_EQ(FaultInScene(scene, answer, whole, bound), "");
      if (testing::SmallSizes()) continue;
      const std::vector<float> again = rig().RunAtOnce(scene, force_simt);
      EXPECT_EQ(0, std::memcmp(whole.data(), again.data(), whole.size() * sizeof(float)))
          << scene.Name() << " differs between runs";
      const std::vector<float> cut = rig().Run(scene, RandomCalls(scene, rng_), force_simt);
      EXPECT_EQ(FaultInScene(scene, answer, cut, bound), "");
      EXPECT_LE(RmsError(answer, cut), 1.2 * RmsError(answer, whole) + 1e-6) << scene.Name();
    }
  }

 private:
  static std::unique_ptr<CudaAttendRig> rig_;
};
std::unique_ptr<CudaAttendRig> CudaAttendTest::rig_;

TEST_F(CudaAttendTest, DecodeMatchesTheTwinForAnyCut) {
  SKIP_WITHOUT_GPU();
  for (const Geometry& g : kGeometries) {
    for (const double sigma : {0.3, 2.0, 8.0}) {
      for (const int max_tokens : {70, 1500}) {
        if (testing::LeftOut(sigma == 2.0 && max_tokens == 70)) continue;
        CheckScene({.kv = KvOf(g),
                    .group = g.group,
                    .num_sequences = 5,
                    .max_tokens = max_tokens,
                    .max_rows = 1,
                    .score_sigma = sigma});
      }
    }
  }
}

TEST_F(CudaAttendTest, SeveralRowsOfASequenceAreCausal) {
  SKIP_WITHOUT_GPU();
  for (const Geometry& g : kGeometries) {
    CheckScene({.kv = KvOf(g),
                .group = g.group,
                .num_sequences = 4,
                .max_tokens = 300,
                .max_rows = 5,
                .score_sigma = 2});
  }
}

TEST_F(CudaAttendTest, PrefillMatchesTheTwinForAnyCut) {
  SKIP_WITHOUT_GPU();
  for (const Geometry& g : kGeometries) {
    if (testing::SmallSizes()) {
      // Rows enough for two tiles, and more blocks than a kernel has stages
      const SceneShape one = {.kv = KvOf(g),
                              .group = g.group,
                              .max_tokens = 250,
                              .max_rows = 65 / g.group + 20,
                              .score_sigma = 1,
                              .all_as_large = true};
      if (!IsForPlainKernel(g)) CheckScene(one);
      continue;
    }
    for (const double sigma : {0.3, 4.0}) {
      CheckScene({.kv = KvOf(g),
                  .group = g.group,
                  .num_sequences = 3,
                  .max_tokens = 500,
                  .max_rows = 160,
                  .score_sigma = sigma});
    }
  }
}

TEST_F(CudaAttendTest, ManySpansTakeSeveralPasses) {
  SKIP_WITHOUT_GPU();
  CheckScene({.kv = KvOf({2, 4, 32, 32}),
              .group = 4,
              .num_sequences = testing::SmallSizes() ? 40 : 60,
              .max_tokens = testing::SmallSizes() ? 100 : 6000,
              .max_rows = 1,
              .score_sigma = 1,
              .one_block_spans = true});
}

// More blocks than there is room for as operands at once.
TEST_F(CudaAttendTest, LongPromptsTakeSeveralPasses) {
  SKIP_WITHOUT_GPU();
  CheckScene({.kv = KvOf({16, 1, 128, 128}),
              .group = 1,
              .num_sequences = 4,
              .max_tokens = 6000,
              .max_rows = 80,
              .score_sigma = 1});
}

TEST_F(CudaAttendTest, Float32KeysAreExactToFloat32) {
  SKIP_WITHOUT_GPU();
  for (const Geometry& g : kGeometries) {
    if (testing::LeftOut(g.k_dim == 32 && !g.value_in_key)) continue;
    const Scene scene = RandomScene({.kv = KvOf(g, KvDtype::kF32),
                                     .group = g.group,
                                     .num_sequences = testing::SmallSizes() ? 2 : 4,
                                     .max_tokens = testing::SmallSizes() ? 100 : 400,
                                     .max_rows = testing::SmallSizes() ? 4 : 20,
                                     .score_sigma = 1},
                                    rng_);
    const SceneAnswer answer = AnswerScene(scene);
    rig().Load(scene);
    EXPECT_EQ(FaultInScene(scene, answer, rig().RunAtOnce(scene, false),
                           [&](size_t i) { return 1e-5 * (1 + answer.abs_sum[i]); }),
              "");
  }
}

// Each weight strays by at most 2^-9 of itself from rounding to bf16, independently of the others:
// 6 sigma of their sum. What all share, the sum of weights, is the last term.
double FlatBound(const SceneAnswer& answer, size_t i) {
  return 6 * 0x1p-8 / std::sqrt(3.0) * std::sqrt(answer.square_sum[i]) +
         0x1p-12 * std::fabs(answer.out[i]) + 1e-6;
}

TEST_F(CudaAttendTest, FlatScoresShowALostToken) {
  SKIP_WITHOUT_GPU();
  for (const Geometry& g : kGeometries) {
    for (const int max_rows : {1, 100}) {
      Scene scene = RandomScene({.kv = KvOf(g),
                                 .group = g.group,
                                 .num_sequences = 2,
                                 .max_tokens = 1000,
                                 .max_rows = max_rows,
                                 .score_sigma = 0.3},
                                rng_);
      const SceneAnswer answer = AnswerScene(scene);
      const auto bound = [&](size_t i) { return FlatBound(answer, i); };
      rig().Load(scene);
      EXPECT_EQ(FaultInScene(scene, answer, rig().RunAtOnce(scene, false), bound), "");
      // The planted bug: one token of one span.
      for (SceneSpan& span : scene.spans) {
        if (span.num_tokens % kBlockTokens == 1) continue;
        --span.num_tokens;
        break;
      }
      EXPECT_NE(FaultInScene(scene, answer, rig().RunAtOnce(scene, false), bound), "");
    }
  }
}

// Keys of +-1 that all differ: a query of 128 times a key finds it and nothing else, so the output
// is that token's value in every bit. Every query slot looks for every token.
TEST_F(CudaAttendTest, FindsEveryNeedle) {
  SKIP_WITHOUT_GPU();
  constexpr int kTokens = 150;
  for (const Geometry& g : kGeometries) {
    for (const int num_rows : {1, 3, 75}) {
      Scene scene;
      scene.kv = KvOf(g);
      scene.num_heads = g.num_kv_heads * g.group;
      scene.num_rows = num_rows;
      scene.rows = {{.first_row = 0, .num_rows = num_rows, .first_position = kTokens}};
      SceneSpan span;
      span.num_tokens = kTokens;
      span.readers = {0};
      for (int head = 0; head < g.num_kv_heads; ++head) {
        const testing_support::AttentionProblem needles =
            testing_support::NeedleProblem({.k_dim = g.k_dim,
                                            .v_dim = g.v_dim,
                                            .value_in_key = g.value_in_key,
                                            .dtype = KvDtype::kBf16,
                                            .num_rows = 1,
                                            .num_tokens = kTokens},
                                           rng_);
        span.k.push_back(needles.k);
        span.v.push_back(needles.v);
      }
      scene.spans = {span};
      rig().Load(scene);
      const int num_slots = num_rows * scene.num_heads;
      for (int shift = 0; shift < kTokens; ++shift) {
        scene.q.clear();
        const auto wanted = [&](int slot) { return (slot * 7 + shift) % kTokens; };
        const auto head_of = [&](int slot) { return slot % scene.num_heads / g.group; };
        for (int slot = 0; slot < num_slots; ++slot) {
          const auto key = span.k[head_of(slot)].begin() + wanted(slot) * g.k_dim;
          for (int d = 0; d < g.k_dim; ++d) scene.q.push_back(128 * key[d]);
        }
        const std::vector<float> out = rig().RunAtOnce(scene, false);
        for (int slot = 0; slot < num_slots; ++slot) {
          const auto value = span.v[head_of(slot)].begin() + wanted(slot) * g.v_dim;
          ASSERT_TRUE(std::equal(value, value + g.v_dim, out.begin() + int64_t{slot} * g.v_dim))
              << scene.Name() << " slot " << slot << " token " << wanted(slot);
        }
      }
    }
  }
}

TEST_F(CudaAttendTest, RowsThatSeeNothingGiveZero) {
  SKIP_WITHOUT_GPU();
  for (const int num_rows : {1, 80}) {
    for (const bool force_simt : {false, true}) {
      Scene scene = RandomScene({.kv = KvOf({2, 4, 64, 64}), .group = 4, .max_tokens = 400}, rng_);
      scene.num_rows = num_rows;
      scene.rows = {{.first_row = 0, .num_rows = num_rows, .first_position = 0}};
      scene.q.assign(static_cast<size_t>(num_rows) * scene.num_heads * 64, 1.0f);
      for (SceneSpan& span : scene.spans) span.first_position += num_rows;
      rig().Load(scene);
      for (const float value : rig().RunAtOnce(scene, force_simt)) ASSERT_EQ(value, 0.0f);
    }
  }
}

class CudaMergeTest : public CudaAttendTest {
 protected:
  static constexpr int kRows = 3, kHeads = 2, kVDim = 64, kOutDim = 40;
  static constexpr int kStates = kRows * kHeads;

  void SetUp() override {
    SKIP_WITHOUT_GPU();
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<float>* values) {
      for (int i = 0; i < kStates * kVDim; ++i) values->push_back(normal(rng_));
    };
    fill(&o_);
    fill(&cpu_out_);
    const float empty = kernels::kEmptyLse;
    // The device's side is empty in the first two, the CPU's in the second and the third.
    m_ = {empty, empty, 0, 1, 2, 300};
    l_ = {0, 0, 1, 2, 3, 4};
    cpu_lse_ = {1, empty, empty, 3, -200, -1};
    mapped_ = *rig().device().AllocateHost(4096, device::HostMemory::kPageLocked, "partials");
  }

  void WritePartials() {
    std::memcpy(mapped_out(), cpu_out_.data(), sizeof(float) * kStates * kVDim);
    std::memcpy(mapped_lse(), cpu_lse_.data(), sizeof(float) * kStates);
  }

  // Returns [kStates, kOutDim]. Behind a wait the partials come when the device waits already.
  std::vector<float> Merge(ComputeType compute, bool behind_wait = false) {
    device::CudaQueue& queue = rig().device().compute();
    auto* flag = new (mapped_.data() + 4000 / 64 * 64) std::atomic<uint64_t>(0);
    if (!behind_wait) WritePartials();
    const auto attend = rig().MakeAttend(kHeads, kVDim, compute, false);
    const Uploaded o = rig().Upload(o_.data(), kStates * kVDim * 4);
    const Uploaded m = rig().Upload(m_.data(), kStates * 4);
    const Uploaded l = rig().Upload(l_.data(), kStates * 4);
    device::Buffer out = *rig().device().AllocateDevice(kStates * kOutDim * 4, "out");
    if (behind_wait) {
      // A kernel is loaded when it is first launched, and the driver may do that only while nothing
      // runs: this one would come when the wait has given up.
      attend->WarmUp(KvOf({1, kHeads, kVDim, kVDim}), kHeads);
      queue.WaitFlag(flag, 1, absl::Seconds(5), nullptr);
    }
    attend->Merge({.kv = KvOf({1, kHeads, kVDim, kVDim}),
                   .num_rows = kRows,
                   .num_heads = kHeads,
                   .out_dim = kOutDim,
                   .state = {reinterpret_cast<float*>(o.data()), reinterpret_cast<float*>(m.data()),
                             reinterpret_cast<float*>(l.data())},
                   .cpu_out = mapped_out(),
                   .cpu_lse = mapped_lse(),
                   .behind_wait = behind_wait,
                   .out = out.data()});
    const device::Event merged = queue.Record();
    if (behind_wait) {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
      EXPECT_FALSE(merged.Done());
      WritePartials();
      flag->store(1, std::memory_order_release);
    }
    EXPECT_TRUE(merged.Wait(absl::Seconds(10)).ok());
    std::vector<float> values(kStates * kOutDim);
    if (compute == ComputeType::kF32) {
      cudaMemcpy(values.data(), out.data(), values.size() * 4, cudaMemcpyDefault);
    } else {
      std::vector<uint16_t> halves(values.size());
      cudaMemcpy(halves.data(), out.data(), values.size() * 2, cudaMemcpyDefault);
      std::transform(halves.begin(), halves.end(), values.begin(), Bf16ToFloat);
    }
    return values;
  }

  void ExpectMerged(const std::vector<float>& got, bool with_cpu, double relative) {
    for (int i = 0; i < kStates; ++i) {
      const double lse = l_[i] == 0 ? -INFINITY : m_[i] + std::log2(l_[i]);
      const double cpu_lse = with_cpu ? cpu_lse_[i] : -INFINITY;
      const double base = std::max({lse, cpu_lse, -1e9});
      const double weight = std::exp2(lse - base), cpu_weight = std::exp2(cpu_lse - base);
      for (int d = 0; d < kOutDim; ++d) {
        double want = 0;
        if (weight > 0) want += weight * o_[i * kVDim + d] / l_[i];
        if (cpu_weight > 0) want += cpu_weight * cpu_out_[i * kVDim + d];
        if (weight + cpu_weight > 0) want /= weight + cpu_weight;
        EXPECT_NEAR(got[i * kOutDim + d], want, relative * (1 + std::fabs(want)))
            << "state " << i << " dim " << d;
      }
    }
  }

  float* mapped_out() { return reinterpret_cast<float*>(mapped_.data()); }
  float* mapped_lse() { return mapped_out() + kStates * kVDim; }

  std::vector<float> o_, m_, l_, cpu_out_, cpu_lse_;
  device::Buffer mapped_;
};

TEST_F(CudaMergeTest, TakesThePartialsOfTheCpuAndLeavesThemEmpty) {
  ExpectMerged(Merge(ComputeType::kF32), true, 1e-5);
  for (int i = 0; i < kStates; ++i) EXPECT_EQ(mapped_lse()[i], kernels::kEmptyLse);
  ExpectMerged(Merge(ComputeType::kBf16), true, 0x1p-8);
}

TEST_F(CudaMergeTest, BehindAWaitItTakesWhatTheCpuWroteBeforeTheFlag) {
  if (!rig().device().compute().waits_by_kernel()) GTEST_SKIP() << "the caller waits itself";
  for (int round = 0; round < 20; ++round) {
    for (float& value : cpu_out_) value += 1;
    ExpectMerged(Merge(ComputeType::kF32, /*behind_wait=*/true), true, 1e-5);
    for (int i = 0; i < kStates; ++i) EXPECT_EQ(mapped_lse()[i], kernels::kEmptyLse);
  }
}

TEST_F(CudaMergeTest, LeavesThePartialsAloneOnceAWaitRanOut) {
  device::CudaQueue& queue = rig().device().compute();
  std::atomic<uint64_t>* flag = new (mapped_.data() + 3904 / 64 * 64) std::atomic<uint64_t>(0);
  queue.WaitFlag(flag, 1, absl::Milliseconds(1), nullptr);
  const std::vector<float> got = Merge(ComputeType::kF32);
  EXPECT_FALSE(queue.TakeError().ok());
  for (int i = 0; i < kStates; ++i) EXPECT_EQ(mapped_lse()[i], cpu_lse_[i]);
  ExpectMerged(got, false, 1e-5);
}

TEST_F(CudaAttendTest, WarmUpTouchesEveryKernel) {
  SKIP_WITHOUT_GPU();
  for (const Geometry& g : kGeometries) {
    for (const bool force_simt : {false, true}) {
      const auto attend =
          rig().MakeAttend(g.num_kv_heads * g.group, g.k_dim, ComputeType::kBf16, force_simt);
      attend->WarmUp(KvOf(g), g.num_kv_heads * g.group);
    }
  }
  ASSERT_TRUE(rig().device().compute().Record().Wait(absl::Seconds(10)).ok());
  EXPECT_TRUE(rig().device().compute().TakeError().ok());
}

TEST(CudaAttend, RefusesLimitsWithoutHeads) {
  SKIP_WITHOUT_GPU();
  CudaAttendRig rig;
  const auto attend = CudaAttend::Create(rig.device(), {}, ComputeType::kF32, false);
  EXPECT_EQ(attend.status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace writescope::ops
