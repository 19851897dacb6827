// Each call on the GPU against the same call on the CPU device: float32 to 1e-5 of the values, bf16
// to what its roundings allow. Inputs are bf16 numbers, so both begin with the same.
#include "engine/ops/cuda/cuda_ops.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <numeric>

#include "tests/engine/ops/cuda_ops_rig.h"
#include "tests/support/gpu.h"
#include "tests/support/seed.h"

namespace writescope::ops {
namespace {

using testing_support::TestSeed;

constexpr OpsLimits kLimits = {.max_tokens = 512,
                               .hidden = 1024,
                               .max_mlp_width = 512,
                               .num_experts = 8,
                               .experts_per_token = 2,
                               .num_heads = 8,
                               .max_head_dim = 256};

class CudaOpsTest : public ::testing::TestWithParam<ComputeType> {
 protected:
  void SetUp() override { SKIP_WITHOUT_GPU(); }

  // scenario(rig) on the CPU and twice on the GPU, which must give the same bits. The GPU's values
  // may differ by 1e-5 * scale, and in bf16 by `rounds` roundings of values of `scale`.
  template <typename Scenario>
  void ExpectSame(const Scenario& scenario, double scale, double rounds = 1) {
    OpsRig cpu(2, kLimits);
    const std::vector<float> want = scenario(cpu);
    std::vector<float> got;
    for (int i = testing::SmallSizes() ? 1 : 0; i < 2; ++i) {
      CudaRig cuda(kLimits, {.compute = GetParam()});
      const std::vector<float> values = scenario(cuda);
      if (!got.empty()) {
        EXPECT_TRUE(SameBits(values, got));
      }
      got = values;
    }
    const bool is_bf16 = GetParam() == ComputeType::kBf16;
    ExpectClose(got, want, 1e-5 * scale + (is_bf16 ? (rounds - 1) * kBf16Round * scale : 0),
                is_bf16 ? 1.01 * kBf16Round : 1e-5);
  }
};

TEST_P(CudaOpsTest, EmbedAndGatherRows) {
  std::mt19937_64 rng(TestSeed());
  for (const int dim : {8, 33, 64, 1000}) {
    if (testing::LeftOut(dim < 64)) continue;
    const std::vector<float> table = Bf16Values(int64_t{50} * dim, 1, rng);
    for (const WeightType type : {WeightType::kBf16, WeightType::kF32}) {
      ExpectSame(
          [&](auto& rig) {
            const std::vector<TokenId> ids = {7, 0, 49, 7, 13};
            const std::vector<int> rows = {4, 1, 1, 0};
            void* x = Output(rig, 5 * dim);
            void* out = Output(rig, 4 * dim);
            rig.ops().Embed(ids, rig.Load(table, 50, dim, type), x);
            rig.ops().GatherRows(rows, dim, x, out);
            return ValuesOf(rig, out, 4 * dim);
          },
          0);
    }
  }
}

TEST_P(CudaOpsTest, RmsNorm) {
  std::mt19937_64 rng(TestSeed());
  for (const auto& [rows, dim] : {std::pair{1, 7}, {3, 64}, {300, 512}, {17, 1023}, {2, 4096}}) {
    if (testing::LeftOut(rows < 10 && dim < 100)) continue;
    const std::vector<float> x = Bf16Values(int64_t{rows} * dim, 3, rng);
    const std::vector<float> weight = Bf16Values(dim, 1, rng);
    ExpectSame(
        [&, rows = rows, dim = dim](auto& rig) {
          void* out = Output(rig, int64_t{rows} * dim);
          rig.ops().RmsNorm(rows, dim, rig.Upload(x), Vector(rig, weight), 1e-5f, out);
          return ValuesOf(rig, out, int64_t{rows} * dim);
        },
        1);
  }
}

TEST_P(CudaOpsTest, MaxOfRows) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  std::mt19937_64 rng(TestSeed());
  for (const auto& [rows, dim] : {std::pair{1, 1}, {3, 33}, {5, 64}, {2, 8191}, {7, 151936}}) {
    if (testing::LeftOut(dim < 100)) continue;
    std::vector<float> x = Bf16Values(int64_t{rows} * dim, 1, rng);
    // Equal ones, zeros of both signs above all else, what is no number, and nothing at all.
    const auto row = [&](int r) { return x.begin() + r % rows * int64_t{dim}; };
    std::fill_n(row(1) + dim / 3, std::min(dim - dim / 3, 9), 7.0f);
    std::transform(row(2), row(2) + dim, row(2), [](float v) { return v > 0 ? -0.0f : v; });
    *(row(2) + dim / 2) = 0.0f;
    *(row(3) + dim - 1) = kInf;
    *(row(4) + dim / 2) = *(row(4) + dim - 1) = NAN;
    std::fill_n(row(5), dim, -kInf);
    std::fill_n(row(6), dim, NAN);
    CudaRig cuda(kLimits, {.compute = GetParam()});
    auto* got = reinterpret_cast<kernels::RowMax*>(
        cuda.HostMemory(rows * int64_t{sizeof(kernels::RowMax)}));
    cuda.ops().MaxOfRows(rows, dim, cuda.Upload(x), got);
    cuda.Finish();
    for (int r = 0; r < rows; ++r) {
      const kernels::RowMax want = kernels::MaxOfRowRef(dim, &*row(r));
      EXPECT_EQ(got[r].value, want.value);
      EXPECT_EQ(got[r].index, want.index) << "row " << r << " of " << dim;
      EXPECT_EQ(got[r].first_nan, want.first_nan) << "row " << r << " of " << dim;
    }
  }
}

TEST_P(CudaOpsTest, Linear) {
  std::mt19937_64 rng(TestSeed());
  struct Size {
    int rows, n, k;
  };
  for (const Size& size : {Size{1, 5, 33},
                           {1, 512, 1024},
                           {3, 111, 700},
                           {8, 300, 64},
                           {16, 48, 2048},
                           {65, 130, 1030},
                           {300, 257, 65},
                           {511, 129, 96}}) {
    for (const WeightType type : {WeightType::kF32, WeightType::kBf16}) {
      for (const bool accumulate : {false, true}) {
        if (testing::LeftOut(size.rows < 100 && accumulate)) continue;
        const float sigma = 1 / std::sqrt(static_cast<float>(size.k));
        const std::vector<float> w = Bf16Values(int64_t{size.n} * size.k, sigma, rng);
        const std::vector<float> x = Bf16Values(int64_t{size.rows} * size.k, 1, rng);
        const std::vector<float> y = Bf16Values(int64_t{size.rows} * size.n, 1, rng);
        ExpectSame(
            [&](auto& rig) {
              void* out = rig.Upload(y);
              rig.ops().Linear(size.rows, rig.Upload(x), rig.Load(w, size.n, size.k, type), out,
                               accumulate);
              return ValuesOf(rig, out, int64_t{size.rows} * size.n);
            },
            // cuBLAS may round a product of up to about 4 before it adds it.
            accumulate ? 4 : 1, accumulate ? 2 : 1);
      }
    }
  }
}

struct GqaCase {
  int tokens, heads, kv_heads, dim, rope_dim;
  bool norm;
  KvDtype dtype;
};

TEST_P(CudaOpsTest, GqaPrepare) {
  std::mt19937_64 rng(TestSeed());
  for (const GqaCase& c : {GqaCase{1, 4, 2, 16, 16, false, KvDtype::kBf16},
                           {5, 8, 1, 40, 20, true, KvDtype::kF32},
                           {70, 8, 4, 128, 128, true, KvDtype::kBf16},
                           {300, 6, 2, 24, 24, true, KvDtype::kBf16},
                           {512, 9, 3, 24, 24, true, KvDtype::kBf16}}) {
    if (testing::LeftOut(c.tokens < 10 || (c.tokens == 512 && GetParam() == ComputeType::kBf16))) {
      continue;
    }
    const KvGeometry kv = {.num_kv_heads = c.kv_heads,
                           .k_dim = PadDim(c.dim),
                           .v_dim = PadDim(c.dim),
                           .dtype = c.dtype};
    const std::vector<float> q = Bf16Values(int64_t{c.tokens} * c.heads * c.dim, 1, rng);
    const std::vector<float> k = Bf16Values(int64_t{c.tokens} * c.kv_heads * c.dim, 1, rng);
    const std::vector<float> v = Bf16Values(int64_t{c.tokens} * c.kv_heads * c.dim, 1, rng);
    const std::vector<float> norm = Bf16Values(c.dim, 1, rng);
    const int num_blocks = c.tokens / kBlockTokens + 2;
    const auto run = [&](auto& rig, bool queries) {
      std::byte* blocks = rig.Allocate(num_blocks * kv.block_bytes());
      std::vector<int64_t> positions;
      std::vector<KvTarget> targets;
      for (int t = 0; t < c.tokens; ++t) {
        const int at = t + 40;  // Begins within a block
        positions.push_back(1000 + 7 * t);
        targets.push_back({blocks + at / kBlockTokens * kv.block_bytes(), at % kBlockTokens});
      }
      const int64_t q_floats = int64_t{c.tokens} * c.heads * kv.k_dim;
      float* q_out = rig.Floats(q_floats);
      rig.ops().GqaPrepare(
          {.num_tokens = c.tokens,
           .num_heads = c.heads,
           .head_dim = c.dim,
           .kv = kv,
           .q = rig.Upload(q),
           .k = rig.Upload(k),
           .v = rig.Upload(v),
           .q_norm = c.norm ? Vector(rig, norm) : nullptr,
           .k_norm = c.norm ? Vector(rig, norm) : nullptr,
           .norm_eps = 1e-6f,
           .rope = {Vector(rig, InverseFrequencies(c.rope_dim / 2)), c.rope_dim, 1.25f},
           .scale_log2 = 0.3f,
           .positions = positions,
           .targets = targets,
           .q_out = q_out});
      if (queries) return FloatsOf(rig, q_out, q_floats);
      const std::vector<std::byte> bytes = BytesOf(rig, blocks, num_blocks * kv.block_bytes());
      std::vector<float> values;
      for (size_t i = 0; i < bytes.size(); i += KvDtypeBytes(c.dtype)) {
        if (c.dtype == KvDtype::kF32) {
          std::memcpy(&values.emplace_back(), &bytes[i], 4);
        } else {
          uint16_t half;
          std::memcpy(&half, &bytes[i], 2);
          values.push_back(Bf16ToFloat(half));
        }
      }
      return values;
    };
    OpsRig cpu(2, kLimits);
    CudaRig cuda(kLimits, {.compute = GetParam()});
    // Sines of angles of some thousands: float32 angles are the same, sines to an ulp.
    ExpectClose(run(cuda, true), run(cpu, true), 1e-5, 1e-5);
    // A key may lie near the middle of two bf16 numbers and be rounded the other way.
    ExpectClose(run(cuda, false), run(cpu, false), 1e-5,
                c.dtype == KvDtype::kBf16 ? 2.02 * kBf16Round : 1e-5);
  }
}

TEST_P(CudaOpsTest, MlaPrepareAndOutput) {
  std::mt19937_64 rng(TestSeed());
  struct Case {
    int tokens, heads, nope, rope, latent, v;
    bool even;  // The heads' matrices lie evenly.
  };
  for (const Case& c : {Case{1, 2, 16, 8, 16, 16, true},
                        {3, 4, 24, 16, 72, 20, false},
                        {130, 8, 128, 64, 512, 128, true}}) {
    if (testing::LeftOut(c.tokens < 100)) continue;
    const KvGeometry kv = {.num_kv_heads = 1,
                           .k_dim = PadDim(c.latent + c.rope),
                           .v_dim = PadDim(c.latent),
                           .value_in_key = true};
    const float sigma = 1 / std::sqrt(static_cast<float>(c.nope));
    const std::vector<float> q =
        Bf16Values(int64_t{c.tokens} * c.heads * (c.nope + c.rope), 1, rng);
    const std::vector<float> kv_a = Bf16Values(int64_t{c.tokens} * (c.latent + c.rope), 1, rng);
    const std::vector<float> norm = Bf16Values(c.latent, 1, rng);
    std::vector<std::vector<float>> ups, values;
    for (int h = 0; h < c.heads; ++h) {
      ups.push_back(Bf16Values(int64_t{c.latent} * c.nope, sigma, rng));
      values.push_back(Bf16Values(int64_t{c.v} * c.latent, sigma, rng));
    }
    const auto run = [&](auto& rig, int what) {
      std::vector<Matrix> key_up, value_up;
      const auto bytes = [&](int64_t rows, int64_t cols) {
        return rig.ops().footprint().matrix_bytes(WeightType::kBf16, WeightFormat::kSource, rows,
                                                  cols);
      };
      const int64_t up_bytes = bytes(c.latent, c.nope), value_bytes = bytes(c.v, c.latent);
      std::byte* memory = rig.Allocate(3 * c.heads * (up_bytes + value_bytes));
      for (int h = 0; h < c.heads; ++h) {
        const int64_t at = (c.even || h % 2 == 0 ? h : 2 * h) * (up_bytes + value_bytes);
        const auto load = [&](std::byte* to, const std::vector<float>& from, int64_t rows,
                              int64_t cols) {
          std::vector<uint16_t> halves;
          for (const float value : from) halves.push_back(FloatToBf16(value));
          return *rig.ops().LoadMatrix(to, WeightType::kBf16, WeightFormat::kSource, rows, cols,
                                       reinterpret_cast<const std::byte*>(halves.data()));
        };
        key_up.push_back(load(memory + at, ups[h], c.latent, c.nope));
        value_up.push_back(load(memory + at + up_bytes, values[h], c.v, c.latent));
      }
      std::byte* blocks = rig.Allocate(4 * kv.block_bytes());
      std::vector<int64_t> positions(c.tokens);
      std::iota(positions.begin(), positions.end(), 90'000);
      std::vector<KvTarget> targets;
      for (int t = 0; t < c.tokens; ++t) {
        targets.push_back({blocks + t / kBlockTokens * kv.block_bytes(), t % kBlockTokens});
      }
      const int64_t q_floats = int64_t{c.tokens} * c.heads * kv.k_dim;
      float* q_out = rig.Floats(q_floats);
      rig.ops().MlaPrepare({.num_tokens = c.tokens,
                            .num_heads = c.heads,
                            .nope_dim = c.nope,
                            .rope_dim = c.rope,
                            .latent_dim = c.latent,
                            .kv = kv,
                            .q = rig.Upload(q),
                            .kv_a = rig.Upload(kv_a),
                            .kv_norm = Vector(rig, norm),
                            .norm_eps = 1e-6f,
                            .rope = {Vector(rig, InverseFrequencies(c.rope / 2)), c.rope, 1},
                            .scale_log2 = 0.3f,
                            .key_up = key_up,
                            .positions = positions,
                            .targets = targets,
                            .q_out = q_out});
      if (what == 0) return FloatsOf(rig, q_out, q_floats);
      if (what == 1) {
        const std::vector<std::byte> raw = BytesOf(rig, blocks, 4 * kv.block_bytes());
        std::vector<float> latents;
        for (size_t i = 0; i < raw.size(); i += 2) {
          uint16_t half;
          std::memcpy(&half, &raw[i], 2);
          latents.push_back(Bf16ToFloat(half));
        }
        return latents;
      }
      std::mt19937_64 latent_rng(5);
      void* out = Output(rig, int64_t{c.tokens} * c.heads * c.v);
      const auto latent = Bf16Values(int64_t{c.tokens} * c.heads * c.latent, 1, latent_rng);
      rig.ops().MlaOutput(c.tokens, value_up, rig.Upload(latent), out);
      return ValuesOf(rig, out, int64_t{c.tokens} * c.heads * c.v);
    };
    OpsRig cpu(2, kLimits);
    CudaRig cuda(kLimits, {.compute = GetParam()});
    ExpectClose(run(cuda, 0), run(cpu, 0), 2e-5, 1e-5);
    ExpectClose(run(cuda, 1), run(cpu, 1), 1e-5, 2.02 * kBf16Round);
    ExpectClose(run(cuda, 2), run(cpu, 2), 4e-5,
                GetParam() == ComputeType::kBf16 ? 1.01 * kBf16Round : 1e-5);
  }
}

TEST_P(CudaOpsTest, PublishesQueriesUnlessTheQueueHasFailed) {
  CudaRig cuda(kLimits, {.compute = GetParam()});
  const bool is_narrow = GetParam() == ComputeType::kBf16;
  std::vector<float> values(200'000);
  for (size_t i = 0; i < values.size(); ++i) values[i] = 1 + static_cast<float>(i) / 3;
  const float* q = Vector(cuda, values);
  std::byte* to = cuda.HostMemory(800'000);
  auto* ready = new (cuda.HostMemory(64)) std::atomic<uint64_t>(0);
  device::CudaQueue& queue = cuda.device().compute();
  const auto at = [&](int64_t i) {
    return is_narrow ? Bf16ToFloat(reinterpret_cast<const uint16_t*>(to)[i])
                     : reinterpret_cast<const float*>(to)[i];
  };
  uint64_t turn = 0;
  for (const int64_t count : {1, 8, 9'999, 200'000}) {  // No whole eights, one, and more
    std::memset(to, 0, 800'000);
    double began_s = 0, ended_s = 0;
    const double before_s = device::NowSeconds();
    cuda.ops().PublishQueries({.num_values = count,
                               .q = q,
                               .to = to,
                               .ready = ready,
                               .value = ++turn,
                               .began_s = &began_s,
                               .ended_s = &ended_s});
    // They are there once the flag is, whatever else is submitted.
    while (ready->load(std::memory_order_acquire) < turn) {
      ASSERT_LT(device::NowSeconds(), before_s + 10);
    }
    const double seen_s = device::NowSeconds();
    for (int64_t i = 0; i < 200'000; ++i) {
      const float value = values[static_cast<size_t>(i)];
      const float want = i >= count ? 0 : is_narrow ? Bf16ToFloat(FloatToBf16(value)) : value;
      ASSERT_EQ(at(i), want) << i << " of " << count;
    }
    ASSERT_TRUE(queue.Record().Wait(absl::Seconds(10)).ok());
    EXPECT_GT(began_s, before_s - 1e-4);
    EXPECT_GE(ended_s, began_s);
    EXPECT_LT(ended_s, seen_s + 1e-4);
  }
  std::memset(to, 0, 800'000);
  auto* never = new (cuda.HostMemory(64)) std::atomic<uint64_t>(0);
  queue.WaitFlag(never, 1, absl::Milliseconds(5), nullptr);
  cuda.ops().PublishQueries(
      {.num_values = 10'000, .q = q, .to = to, .ready = ready, .value = ++turn});
  ASSERT_TRUE(queue.Record().Wait(absl::Seconds(10)).ok());
  for (int64_t i = 0; i < 10'000; ++i) ASSERT_EQ(at(i), 0) << i;
  EXPECT_EQ(ready->load(), turn);
  EXPECT_EQ(queue.TakeError().code(), absl::StatusCode::kDeadlineExceeded);
}

TEST_P(CudaOpsTest, RandomMatricesAreThoseOfTheCpu) {
  const auto make = [](auto& rig, WeightType type) {
    std::byte* to = rig.Allocate(100 * 104 * 4);
    auto matrix = rig.ops().RandomMatrix(to, type, WeightFormat::kSource, 100, 104, 0.02f, 42);
    CHECK(matrix.ok()) << matrix.status();
    void* out = Output(rig, 100 * 104);
    std::vector<TokenId> ids(100);
    std::iota(ids.begin(), ids.end(), 0);
    // The CPU's Embed widens what the GPU has in its own type.
    rig.ops().Embed(ids, *matrix, out);
    return ValuesOf(rig, out, 100 * 104);
  };
  OpsRig cpu(1, kLimits);
  CudaRig cuda(kLimits, {.compute = GetParam()});
  EXPECT_EQ(make(cuda, WeightType::kBf16), make(cpu, WeightType::kBf16));
  if (GetParam() == ComputeType::kBf16) return;  // It rounds what float32 source there is.
  EXPECT_EQ(make(cuda, WeightType::kF32), make(cpu, WeightType::kF32));
}

TEST_P(CudaOpsTest, TakesTheWorkspaceThatItAnnouncesAndWarmsUp) {
  auto device = device::CudaDevice::Create({.budget_bytes = 8 * kGiB});
  ASSERT_TRUE(device.ok()) << device.status();
  const int64_t before = (*device)->device_used_bytes();
  auto ops = CreateCudaOps(**device, kLimits, {.compute = GetParam()});
  ASSERT_TRUE(ops.ok()) << ops.status();
  const int64_t announced = CudaOpsFootprint(GetParam()).workspace_bytes(kLimits);
  EXPECT_NEAR(static_cast<double>((*device)->device_used_bytes() - before),
              static_cast<double>(announced), 6e6);  // Allocations are rounded up.
  device::Buffer memory = *(*device)->AllocateDevice(4 << 20, "matrix");
  ASSERT_TRUE(
      (*ops)
          ->RandomMatrix(memory.data(), WeightType::kBf16, WeightFormat::kSource, 512, 1024, 1, 1)
          .ok());
  const int64_t used = (*device)->device_used_bytes();
  const absl::Status warm =
      (*ops)->WarmUp({.num_kv_heads = 2, .k_dim = 128, .v_dim = 128}, kLimits.num_heads);
  EXPECT_TRUE(warm.ok()) << warm;
  EXPECT_EQ((*device)->device_used_bytes(), used);
}

INSTANTIATE_TEST_SUITE_P(Types, CudaOpsTest,
                         ::testing::Values(ComputeType::kF32, ComputeType::kBf16),
                         [](const auto& info) {
                           return info.param == ComputeType::kF32 ? "f32" : "bf16";
                         });

}  // namespace
}  // namespace writescope::ops
