// Staged steps: the same as the plain calls, on the CPU device and on the GPU; and what was
// recorded of one step serves another.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstring>

#include "tests/engine/ops/cuda_ops_rig.h"
#include "tests/support/gpu.h"
#include "tests/support/seed.h"

namespace writescope::ops {
namespace {

using testing_support::TestSeed;

constexpr int kLayers = 3;
constexpr OpsLimits kLimits = {.max_tokens = 64,
                               .hidden = 256,
                               .max_mlp_width = 64,
                               .num_experts = 8,
                               .experts_per_token = 2,
                               .num_heads = 40,
                               .max_head_dim = 576};

struct Shape {
  int kv_heads, group, k_dim, v_dim;
  bool value_in_key = false;
  int out_dim = 0;  // 0: v_dim
};
// Those of the tensor-core kernels, more heads than a panel has, and one for the plain kernel.
constexpr Shape kShapes[] = {
    {4, 8, 128, 128},        {2, 4, 64, 64, false, 48},    {1, 20, 128, 128},
    {1, 16, 576, 512, true}, {1, 40, 576, 512, true, 500}, {2, 3, 160, 96}};

std::byte* UploadBytes(OpsRig& rig, const std::vector<uint16_t>& values) {
  std::byte* to = rig.Allocate(static_cast<int64_t>(values.size()) * 2);
  std::memcpy(to, values.data(), values.size() * 2);
  return to;
}
std::byte* UploadBytes(CudaRig& rig, const std::vector<uint16_t>& values) {
  std::byte* to = rig.Allocate(static_cast<int64_t>(values.size()) * 2);
  CHECK(cudaMemcpy(to, values.data(), values.size() * 2, cudaMemcpyHostToDevice) == cudaSuccess);
  CudaRig::Settle();
  return to;
}

// Sequences whose sealed blocks lie in a region, [kLayers][blocks], with a hole here and there, and
// whose last tokens lie in tails, [sequences][kLayers] blocks. Two share their first blocks.
class Scene {
 public:
  Scene(const Shape& shape, int num_sequences, int max_blocks, std::mt19937_64& rng)
      : kv_{.num_kv_heads = shape.kv_heads,
            .k_dim = shape.k_dim,
            .v_dim = shape.v_dim,
            .value_in_key = shape.value_in_key},
        num_heads_(shape.kv_heads * shape.group),
        out_dim_(shape.out_dim > 0 ? shape.out_dim : shape.v_dim) {
    for (int i = 0; i < num_sequences; ++i) {
      sealed_.push_back(static_cast<int>(rng() % static_cast<uint64_t>(max_blocks)));
      open_.push_back(1 + static_cast<int>(rng() % kBlockTokens));
    }
    shared_ = num_sequences > 1 ? 3 : 0;
    num_blocks_ = shared_ + num_sequences * (max_blocks + max_blocks / 4 + 1);
    const auto halves = [&](int64_t blocks) {
      std::vector<uint16_t> values;
      for (const float v : Bf16Values(blocks * kv_.block_bytes() / 2, 0.5f, rng)) {
        values.push_back(FloatToBf16(v));
      }
      return values;
    };
    region_ = halves(int64_t{kLayers} * num_blocks_);
    tails_ = halves(int64_t{num_sequences} * kLayers);
    q_ = Bf16Values(int64_t{num_sequences} * num_heads_ * kv_.k_dim, 0.3f, rng);
  }

  int rows() const { return static_cast<int>(open_.size()); }
  int64_t out_values() const { return int64_t{rows()} * num_heads_ * out_dim_; }

  template <typename Rig>
  struct Loaded {
    std::byte* region;
    std::byte* tails;
    const float* q;
    AttendState state;
    void* out;  // [kLayers] of an output
  };
  template <typename Rig>
  Loaded<Rig> Load(Rig& rig) const {
    const int64_t states = int64_t{rows()} * num_heads_;
    return {.region = UploadBytes(rig, region_),
            .tails = UploadBytes(rig, tails_),
            .q = Vector(rig, q_),
            .state = {.o = rig.Floats(states * kv_.v_dim),
                      .m = rig.Floats(states),
                      .l = rig.Floats(states)},
            .out = Output(rig, kLayers * out_values())};
  }

  template <typename Rig>
  bool Stage(Rig& rig, const Loaded<Rig>& at) const {
    const Lists lists = MakeLists(at.region, at.tails);
    const std::vector<TokenId> tokens(open_.size(), 1);
    std::vector<int64_t> positions;
    std::vector<KvTarget> targets;
    for (int i = 0; i < rows(); ++i) {
      positions.push_back(lists.rows[static_cast<size_t>(i)].first_position);
      targets.push_back({.block = at.tails + i * kLayers * kv_.block_bytes(),
                         .slot = open_[static_cast<size_t>(i)] - 1,
                         .layer_stride_bytes = kv_.block_bytes()});
    }
    return rig.ops().StageStep({.kv = kv_,
                                .num_heads = num_heads_,
                                .tokens = tokens,
                                .positions = positions,
                                .targets = targets,
                                .spans = lists.spans,
                                .readers = lists.readers,
                                .rows = lists.rows});
  }

  template <typename Rig>
  void AttendStaged(Rig& rig, const Loaded<Rig>& at) const {
    for (int layer = 0; layer < kLayers; ++layer) {
      rig.ops().AttendStaged({.layer = layer,
                              .q = at.q,
                              .state = at.state,
                              .out_dim = out_dim_,
                              .out = OutOf(rig, at, layer)});
    }
  }

  template <typename Rig>
  void AttendPlain(Rig& rig, const Loaded<Rig>& at) const {
    for (int layer = 0; layer < kLayers; ++layer) {
      Lists lists = MakeLists(at.region, at.tails);
      for (AttendSpan& span : lists.spans) span.base += layer * span.layer_stride_bytes;
      rig.ops().ResetAttention(rows(), num_heads_, kv_.v_dim, at.state);
      rig.ops().Attend({.kv = kv_,
                        .num_heads = num_heads_,
                        .q = at.q,
                        .spans = lists.spans,
                        .readers = lists.readers,
                        .rows = lists.rows,
                        .state = at.state});
      rig.ops().MergeAttention({.kv = kv_,
                                .num_rows = rows(),
                                .num_heads = num_heads_,
                                .out_dim = out_dim_,
                                .state = at.state,
                                .out = OutOf(rig, at, layer)});
    }
  }

  template <typename Rig>
  std::vector<float> Result(Rig& rig, const Loaded<Rig>& at) const {
    return ValuesOf(rig, at.out, kLayers * out_values());
  }

 private:
  struct Lists {
    std::vector<AttendSpan> spans;
    std::vector<int> readers;
    std::vector<ReaderRows> rows;
  };
  Lists MakeLists(std::byte* region, std::byte* tails) const {
    Lists lists;
    const int64_t block_bytes = kv_.block_bytes();
    int next = shared_;
    const auto add = [&](int reader, const std::byte* base, int blocks, int64_t tokens,
                         int64_t position, int64_t stride) {
      lists.spans.push_back({.base = base,
                             .num_blocks = blocks,
                             .num_tokens = tokens,
                             .first_position = position,
                             .first_reader = static_cast<int>(lists.readers.size()),
                             .num_readers = 1,
                             .layer_stride_bytes = stride});
      lists.readers.push_back(reader);
    };
    for (int i = 0; i < rows(); ++i) {
      const size_t at = static_cast<size_t>(i);
      const int64_t first = shared_ > 0 && i < 2 ? shared_ : 0;
      for (int done = 0; done < sealed_[at];) {  // Runs of up to four blocks
        const int count = std::min(4, sealed_[at] - done);
        add(i, region + next * block_bytes, count, int64_t{count} * kBlockTokens,
            (first + done) * kBlockTokens, num_blocks_ * block_bytes);
        next += count + 1;
        done += count;
      }
      const int64_t position = (first + sealed_[at]) * kBlockTokens;
      add(i, tails + i * kLayers * block_bytes, 1, open_[at], position, block_bytes);
      lists.rows.push_back(
          {.first_row = i, .num_rows = 1, .first_position = position + open_[at] - 1});
    }
    if (shared_ > 0) {
      lists.spans.push_back({.base = region,
                             .num_blocks = shared_,
                             .num_tokens = int64_t{shared_} * kBlockTokens,
                             .first_position = 0,
                             .first_reader = static_cast<int>(lists.readers.size()),
                             .num_readers = 2,
                             .layer_stride_bytes = num_blocks_ * block_bytes});
      lists.readers.insert(lists.readers.end(), {0, 1});
    }
    return lists;
  }
  template <typename Rig>
  void* OutOf(Rig& rig, const Loaded<Rig>& at, int layer) const {
    return static_cast<std::byte*>(at.out) + layer * out_values() * rig.ops().activation_bytes();
  }

  const KvGeometry kv_;
  const int num_heads_;
  const int out_dim_;
  int shared_ = 0;
  int num_blocks_ = 0;
  std::vector<int> sealed_, open_;
  std::vector<uint16_t> region_, tails_;
  std::vector<float> q_;
};

class CudaStagedTest : public ::testing::TestWithParam<ComputeType> {
 protected:
  void SetUp() override { SKIP_WITHOUT_GPU(); }
  std::mt19937_64 rng_{TestSeed()};
};

TEST_P(CudaStagedTest, AttentionIsThatOfThePlainCallsInEveryLayer) {
  for (const Shape& shape : kShapes) {
    for (const auto& [sequences, blocks] : {std::pair{1, 1}, {2, 3}, {1, 150}, {3, 12}, {20, 9}}) {
      // Each kernel once; in bf16 also a plan that does not fit into shared memory.
      const bool is_small = GetParam() == ComputeType::kBf16
                                ? sequences == 2 || (sequences == 20 && shape.k_dim == 64)
                                : sequences == 2 && shape.k_dim == 64;
      if (testing::LeftOut(is_small && shape.group < 40)) continue;
      SCOPED_TRACE(std::to_string(shape.k_dim) + "/" + std::to_string(shape.v_dim) + " x " +
                   std::to_string(shape.group) + ", " + std::to_string(sequences) +
                   " sequences of up to " + std::to_string(blocks));
      const Scene scene(shape, sequences, blocks, rng_);
      OpsRig cpu(2, kLimits);
      const auto on_cpu = scene.Load(cpu);
      EXPECT_FALSE(scene.Stage(cpu, on_cpu));
      scene.AttendStaged(cpu, on_cpu);
      const std::vector<float> want = scene.Result(cpu, on_cpu);
      for (const bool force_simt : {false, true}) {
        // The plain kernel is the same for all shapes.
        if (testing::LeftOut(!force_simt || shape.group == 3)) continue;
        CudaRig cuda(kLimits, {.compute = GetParam(), .force_simt = force_simt});
        const auto on_gpu = scene.Load(cuda);
        scene.AttendPlain(cuda, on_gpu);
        const std::vector<float> plain = scene.Result(cuda, on_gpu);
        EXPECT_TRUE(scene.Stage(cuda, on_gpu));
        scene.AttendStaged(cuda, on_gpu);
        const std::vector<float> staged = scene.Result(cuda, on_gpu);
        // Partials are the same, and added in another order.
        ExpectClose(staged, plain, 2e-5,
                    GetParam() == ComputeType::kBf16 ? 2.02 * kBf16Round : 1e-5);
        // bf16 weights and queries are off by 2^-9 of themselves, and so is the output.
        ExpectClose(staged, want, 0.02, kBf16Round);
      }
    }
  }
}

TEST_P(CudaStagedTest, WhatWasRecordedServesAnotherStep) {
  for (const Shape& shape : kShapes) {
    if (testing::LeftOut(shape.k_dim <= 64 && GetParam() == ComputeType::kBf16)) continue;
    const Scene first(shape, 5, 20, rng_);
    const Scene second(shape, 5, 90, rng_);  // More than fits into a launch's parameters
    CudaRig cuda(kLimits, {.compute = GetParam()});
    const auto at_first = first.Load(cuda);
    auto at_second = second.Load(cuda);
    ASSERT_TRUE(second.Stage(cuda, at_second));
    second.AttendStaged(cuda, at_second);
    const std::vector<float> want = second.Result(cuda, at_second);

    ASSERT_TRUE(first.Stage(cuda, at_first));
    first.AttendStaged(cuda, at_first);  // Loads the kernels.
    at_second.q = at_first.q;            // A recording names q and the output.
    at_second.out = at_first.out;
    ASSERT_TRUE(cuda.ops().BeginRecording().ok());
    first.AttendStaged(cuda, at_first);
    auto recording = cuda.ops().EndRecording();
    ASSERT_TRUE(recording.ok()) << recording.status();
    // Kept, and not run.
    const auto poison = [&] {
      cuda.Finish();  // What was submitted writes there, too.
      CHECK(cudaMemset(at_first.out, 0xff, 64) == cudaSuccess);
      CudaRig::Settle();
    };
    poison();
    EXPECT_TRUE(std::isnan(first.Result(cuda, at_first)[0]));

    const std::vector<float> plain = [&] {
      EXPECT_TRUE(second.Stage(cuda, at_second));
      second.AttendStaged(cuda, at_second);
      return second.Result(cuda, at_second);
    }();
    EXPECT_NE(plain, want);  // Other queries
    poison();
    for (int i = 0; i < 2; ++i) {
      ASSERT_TRUE(second.Stage(cuda, at_second));
      cuda.ops().Replay(**recording);
      EXPECT_EQ(second.Result(cuda, at_second), plain);
    }
  }
}

// As many launches as 48 layers have, and more of those with many parameters: in one recording, and
// in one for each layer.
TEST_P(CudaStagedTest, ARecordingTakesNoMoreThanItAnnounces) {
  constexpr int kModelLayers = 48, kSteps = 4;
  const Scene scene(kShapes[0], 3, 4, rng_);
  CudaRig cuda(kLimits, {.compute = GetParam()});
  const auto at = scene.Load(cuda);
  ASSERT_TRUE(scene.Stage(cuda, at));
  scene.AttendStaged(cuda, at);
  cuda.Finish();
  std::vector<std::unique_ptr<Recording>> kept;
  const auto record = [&](int num_layers) {
    ASSERT_TRUE(cuda.ops().BeginRecording().ok());
    for (int call = 0; call < num_layers * 2; ++call) scene.AttendStaged(cuda, at);
    auto recording = cuda.ops().EndRecording();
    ASSERT_TRUE(recording.ok()) << recording.status();
    cuda.ops().Replay(**recording);
    cuda.Finish();
    kept.push_back(*std::move(recording));
  };
  for (const int layers_each : {kModelLayers, 1}) {
    // What others do on the GPU counts, too: the least of several.
    int64_t taken = INT64_MAX;
    for (int attempt = 0; attempt < 3; ++attempt) {
      size_t before = 0, after = 0, total = 0;
      CHECK(cudaMemGetInfo(&before, &total) == cudaSuccess);
      for (int i = 0; i < kSteps * kModelLayers / layers_each; ++i) record(layers_each);
      CHECK(cudaMemGetInfo(&after, &total) == cudaSuccess);
      taken = std::min(taken, static_cast<int64_t>(before) - static_cast<int64_t>(after));
    }
    std::printf("%d steps of %d launches, recorded %d layers at a time: %.1f MiB\n", kSteps,
                kModelLayers * 2 * kLayers * 2, layers_each, static_cast<double>(taken) / kMiB);
    const int64_t layer_bytes = cuda.ops().footprint().recording_layer_bytes *
                                (layers_each == 1 ? OpsFootprint::kSmallRecordings : 1);
    EXPECT_LE(taken, kSteps * kModelLayers * layer_bytes);
  }
}

TEST_P(CudaStagedTest, ACallWithArraysFromTheHostFailsTheRecordingAndNothingElse) {
  CudaRig cuda(kLimits, {.compute = GetParam()});
  const std::vector<float> x = Bf16Values(4 * 64, 1, rng_);
  void* from = cuda.Upload(x);
  void* to = cuda.Poisoned(64);
  const std::vector<int> rows = {2};
  ASSERT_TRUE(cuda.ops().BeginRecording().ok());
  cuda.ops().GatherRows(rows, 64, from, to);
  EXPECT_FALSE(cuda.ops().EndRecording().ok());
  cuda.ops().GatherRows(rows, 64, from, to);
  EXPECT_EQ(cuda.Download(to, 64), std::vector<float>(x.begin() + 128, x.begin() + 192));
}

// Rows of one product, [q | k | v], and places of a staged step, against arrays of their own and
// places given with the call.
TEST_P(CudaStagedTest, QueriesKeysAndValuesAreThoseOfThePlainCall) {
  constexpr int kTokens = 5, kHeads = 6, kKvHeads = 2, kDim = 40, kHidden = 96;
  constexpr int kWidth = (kHeads + 2 * kKvHeads) * kDim;
  const KvGeometry kv = {.num_kv_heads = kKvHeads, .k_dim = PadDim(kDim), .v_dim = PadDim(kDim)};
  const std::vector<float> rows = Bf16Values(int64_t{kTokens} * kWidth, 1, rng_);
  const std::vector<float> norm = Bf16Values(kDim, 1, rng_);
  const std::vector<float> table = Bf16Values(int64_t{50} * kHidden, 1, rng_);
  const std::vector<TokenId> tokens = {3, 49, 0, 3, 7};
  const std::vector<int64_t> positions = {9, 100, 63, 4000, 64};
  const auto run = [&](auto& rig, bool staged) {
    std::vector<std::vector<float>> parts(3);
    for (int t = 0; t < kTokens; ++t) {
      const float* row = rows.data() + t * kWidth;
      const int ends[] = {0, kHeads * kDim, (kHeads + kKvHeads) * kDim, kWidth};
      for (int i = 0; i < 3; ++i) parts[i].insert(parts[i].end(), row + ends[i], row + ends[i + 1]);
    }
    auto* whole = static_cast<std::byte*>(static_cast<void*>(rig.Upload(rows)));
    const int64_t act = rig.ops().activation_bytes();
    std::byte* blocks = rig.Allocate(kLayers * kTokens * kv.block_bytes());
    const int64_t q_floats = int64_t{kTokens} * kHeads * kv.k_dim;
    float* q_out = rig.Floats(kLayers * q_floats);
    void* x = Output(rig, int64_t{kTokens} * kHidden);
    const Matrix embed = rig.Load(table, 50, kHidden, WeightType::kBf16);
    std::vector<KvTarget> targets;
    std::vector<AttendSpan> spans;
    std::vector<int> readers;
    std::vector<ReaderRows> reader_rows;
    for (int t = 0; t < kTokens; ++t) {
      targets.push_back({.block = blocks + t * kv.block_bytes(),
                         .slot = static_cast<int>(positions[t] % kBlockTokens),
                         .layer_stride_bytes = kTokens * kv.block_bytes()});
      spans.push_back({.base = targets.back().block,
                       .num_blocks = 1,
                       .num_tokens = targets.back().slot + 1,
                       .first_position = positions[t] - targets.back().slot,
                       .first_reader = t,
                       .num_readers = 1,
                       .layer_stride_bytes = kTokens * kv.block_bytes()});
      readers.push_back(t);
      reader_rows.push_back({.first_row = t, .num_rows = 1, .first_position = positions[t]});
    }
    if (staged) {
      rig.ops().StageStep({.step = 1,
                           .kv = kv,
                           .num_heads = kHeads,
                           .tokens = tokens,
                           .positions = positions,
                           .targets = targets,
                           .spans = spans,
                           .readers = readers,
                           .rows = reader_rows});
      // Another step, staged meanwhile, is none of its business.
      const std::vector<TokenId> others = {1};
      const std::vector<int64_t> elsewhere = {70};
      rig.ops().StageStep({.step = 0,
                           .kv = kv,
                           .num_heads = kHeads,
                           .tokens = others,
                           .positions = elsewhere,
                           .targets = std::span(targets).first(1)});
      rig.ops().EmbedStaged(1, embed, x);
    } else {
      rig.ops().Embed(tokens, embed, x);
    }
    GqaPrepareArgs args = {.num_tokens = kTokens,
                           .num_heads = kHeads,
                           .head_dim = kDim,
                           .kv = kv,
                           .q_norm = Vector(rig, norm),
                           .norm_eps = 1e-6f,
                           .rope = {Vector(rig, InverseFrequencies(kDim / 2)), kDim, 1},
                           .scale_log2 = 0.3f};
    args.q = staged ? whole : static_cast<void*>(rig.Upload(parts[0]));
    args.k = staged ? whole + kHeads * kDim * act : static_cast<void*>(rig.Upload(parts[1]));
    args.v = staged ? whole + (kHeads + kKvHeads) * kDim * act
                    : static_cast<void*>(rig.Upload(parts[2]));
    if (staged) args.token_stride = kWidth;
    for (int layer = 0; layer < kLayers; ++layer) {
      args.q_out = q_out + layer * q_floats;
      std::vector<KvTarget> here = targets;
      for (KvTarget& target : here) target.block += layer * target.layer_stride_bytes;
      if (staged) {
        args.staged_layer = layer;
        args.staged_step = 1;
      } else {
        args.positions = positions;
        args.targets = here;
      }
      rig.ops().GqaPrepare(args);
    }
    std::vector<float> result = FloatsOf(rig, q_out, kLayers * q_floats);
    for (const std::byte b : BytesOf(rig, blocks, kLayers * kTokens * kv.block_bytes())) {
      result.push_back(static_cast<float>(b));
    }
    const std::vector<float> embedded = ValuesOf(rig, x, int64_t{kTokens} * kHidden);
    result.insert(result.end(), embedded.begin(), embedded.end());
    return result;
  };
  OpsRig cpu(2, kLimits);
  EXPECT_EQ(run(cpu, true), run(cpu, false));
  CudaRig cuda(kLimits, {.compute = GetParam()});
  EXPECT_EQ(run(cuda, true), run(cuda, false));
}

INSTANTIATE_TEST_SUITE_P(Types, CudaStagedTest,
                         ::testing::Values(ComputeType::kF32, ComputeType::kBf16),
                         [](const auto& info) {
                           return info.param == ComputeType::kF32 ? "f32" : "bf16";
                         });

}  // namespace
}  // namespace writescope::ops
