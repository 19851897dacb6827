// The workers' part of a step against one call of the kernel for each sequence: claims of any size,
// from several workers, with sums that stay in the kernel's order from claim to claim.
#include "engine/attention/cpu_attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "engine/attention/worker_team.h"
#include "engine/base/bf16.h"
#include "engine/device/cpu/cpu_device.h"
#include "engine/kvcache/block_table.h"
#include "tests/engine/kernels/attention_amx_emulated.h"
#include "tests/support/seed.h"

namespace writescope::attention {
namespace {

using kvcache::RegionKind;
using testing_support::TestSeed;

constexpr kernels::AttentionVariant kEmulatedAmx = {"amx_emulated", CpuIsa::kGeneric,
                                                    kernels::AttentionProducts::kBf16,
                                                    kernels::AttentionPartialAmxEmulated};
constexpr int kNumLayers = 2;
// Several sequences, so that claims end within one and cover the end of another.
constexpr int kBlocksOf[] = {3, 1, 70, 6};
constexpr int kNumSequences = std::size(kBlocksOf);

class CpuAttentionTest : public testing::Test {
 protected:
  void Make(const KvGeometry& geometry, int num_heads) {
    geometry_ = geometry;
    num_heads_ = num_heads;
    int num_blocks = 0;
    for (const int blocks : kBlocksOf) num_blocks += blocks;
    device_ = *device::CpuDevice::Create({.budget_bytes = 1 << 20});
    blocks_.emplace(*kvcache::BlockTable::Create(
        {.geometry = geometry, .num_layers = kNumLayers, .blocks = {0, 0, num_blocks, 0}},
        *device_));
    std::mt19937_64 rng(TestSeed());
    std::normal_distribution<float> normal;
    const std::span<std::byte> memory = blocks_->region(RegionKind::kSwing).memory();
    for (size_t at = 0; at < memory.size(); at += 2) {
      const uint16_t value = FloatToBf16(normal(rng));
      std::memcpy(&memory[at], &value, 2);
    }
    queries_.resize(static_cast<size_t>(kNumSequences * num_heads * geometry.k_dim));
    // As a device has them, whichever way it publishes them
    const float scale = 1 / std::sqrt(static_cast<float>(geometry.k_dim));
    for (float& q : queries_) q = Bf16ToFloat(FloatToBf16(scale * normal(rng)));
    for (int i = 0, first = 0; i < kNumSequences; first += kBlocksOf[i++]) {
      // In two runs where there is room: runs of one sequence have readers of their own.
      for (int at = 0; at < kBlocksOf[i];) {
        const int count = at == 0 ? (kBlocksOf[i] + 1) / 2 : kBlocksOf[i] - at;
        attention_.runs.swing.Add({.region = RegionKind::kSwing,
                                   .first_index = first + at,
                                   .num_blocks = count,
                                   .first_position = int64_t{at} * kBlockTokens,
                                   .first_reader = static_cast<int>(attention_.runs.readers.size()),
                                   .num_readers = 1});
        attention_.runs.readers.push_back(i);
        at += count;
      }
      attention_.rows.push_back({.first_row = i, .num_rows = 1});
    }
    attention_.num_rows = kNumSequences;
  }

  // The last layer of the step, of sequence i, in one call.
  void Expect(int i, std::vector<float>* out, std::vector<float>* lse) const {
    const KvGeometry& kv = geometry_;
    const int first = attention_.runs.swing.runs()[static_cast<size_t>(FirstRunOf(i))].first_index;
    const int group = num_heads_ / kv.num_kv_heads;
    std::vector<kernels::KvHeadBlock> blocks;
    for (int b = 0; b < kBlocksOf[i]; ++b) {
      const std::byte* at =
          blocks_->region(RegionKind::kSwing).Address(step_.num_turns - 1, first + b);
      for (int head = 0; head < kv.num_kv_heads; ++head, at += kv.head_bytes()) {
        blocks.push_back({.k = at, .v = at + kv.k_plane_bytes(), .num_tokens = kBlockTokens});
      }
    }
    std::vector<float> o(static_cast<size_t>(num_heads_ * kv.v_dim)), m, l;
    m.assign(static_cast<size_t>(num_heads_), kernels::kEmptyLse);
    l.assign(static_cast<size_t>(num_heads_), 0.0f);
    std::vector<const float*> q_rows;
    std::vector<float*> o_rows, m_rows, l_rows;
    for (int h = 0; h < num_heads_; ++h) {
      q_rows.push_back(&queries_[static_cast<size_t>((i * num_heads_ + h) * kv.k_dim)]);
      o_rows.push_back(&o[static_cast<size_t>(h * kv.v_dim)]);
      m_rows.push_back(&m[static_cast<size_t>(h)]);
      l_rows.push_back(&l[static_cast<size_t>(h)]);
    }
    kEmulatedAmx.run({.k_dim = kv.k_dim,
                      .v_dim = kv.v_dim,
                      .value_in_key = kv.value_in_key,
                      .blocks = blocks,
                      .num_heads = kv.num_kv_heads,
                      .num_rows = group,
                      .q = q_rows.data(),
                      .o = o_rows.data(),
                      .m = m_rows.data(),
                      .l = l_rows.data()});
    out->resize(o.size());
    lse->resize(l.size());
    for (int h = 0; h < num_heads_; ++h) {
      kernels::FinishPartial(kv.v_dim, o_rows[static_cast<size_t>(h)], m[static_cast<size_t>(h)],
                             l[static_cast<size_t>(h)], &(*out)[static_cast<size_t>(h * kv.v_dim)],
                             &(*lse)[static_cast<size_t>(h)]);
    }
  }

  // Ready for a step of one layer.
  void Start(int num_workers, KvDtype query_dtype, const kernels::AttentionVariant& variant) {
    auto cpu = CpuAttention::Create({.geometry = geometry_,
                                     .max_turns = kNumLayers,
                                     .num_heads = num_heads_,
                                     .max_rows = kNumSequences,
                                     .query_dtype = query_dtype,
                                     .num_workers = num_workers,
                                     .variant = &variant},
                                    *device_);
    ASSERT_TRUE(cpu.ok()) << cpu.status();
    cpu_ = *std::move(cpu);
    for (size_t i = 0; i < queries_.size(); ++i) {
      if (query_dtype == KvDtype::kBf16) {
        reinterpret_cast<uint16_t*>(cpu_->queries(0))[i] = FloatToBf16(queries_[i]);
      } else {
        reinterpret_cast<float*>(cpu_->queries(0))[i] = queries_[i];
      }
    }
    turns_ = std::make_unique<TurnProgress[]>(kNumLayers);
    step_.micro_batches = {&attention_, 1};
    step_.blocks = &*blocks_;
    step_.num_turns = 1;
    step_.epoch = 1;
    step_.handoff = true;
    step_.num_workers = num_workers;
    step_.turns = turns_.get();
    step_.flags = cpu_->flags();
    step_.flags[0].query_ready = 1;
    for (int turn = 0; turn < kNumLayers; ++turn) {
      turns_[turn].swing.Reset(attention_.runs.swing.num_blocks());
    }
  }

  void RunAndCompare(int num_workers, KvDtype query_dtype = KvDtype::kF32) {
    Start(num_workers, query_dtype, kEmulatedAmx);
    const auto team = WorkerTeam::Create(num_workers);
    for (int layer = 0; layer < kNumLayers; ++layer) {
      // As the device does between layers, which reads the partials.
      cpu_->ResetPartials(kNumSequences);
      step_.flags[layer].query_ready = 1;
      step_.num_turns = layer + 1;
      team->Start([&](int worker) { cpu_->RunWorker(worker, step_); });
      ASSERT_TRUE(team->AwaitDone(absl::Minutes(1)));
    }
    ExpectAsOneCall();
  }

  // The partials of the last layer that was run.
  void ExpectAsOneCall() const {
    // Weights are rounded to 2^-9 relative to another maximum when blocks come in another order.
    constexpr float kTolerance = 0x1p-7f;
    for (int i = 0; i < kNumSequences; ++i) {
      std::vector<float> out, lse;
      Expect(i, &out, &lse);
      const float* got = cpu_->out() + static_cast<int64_t>(i) * out.size();
      for (size_t at = 0; at < out.size(); ++at) {
        ASSERT_NEAR(got[at], out[at], kTolerance) << "sequence " << i << " value " << at;
      }
      for (int h = 0; h < num_heads_; ++h) {
        EXPECT_NEAR(cpu_->lse()[i * num_heads_ + h], lse[static_cast<size_t>(h)], kTolerance);
      }
    }
  }

  int FirstRunOf(int sequence) const {
    const auto it = std::ranges::find(attention_.runs.readers, sequence);
    return static_cast<int>(it - attention_.runs.readers.begin());
  }

  KvGeometry geometry_;
  int num_heads_ = 0;
  std::unique_ptr<device::CpuDevice> device_;
  std::optional<kvcache::BlockTable> blocks_;
  StepAttention attention_;
  std::vector<float> queries_;
  std::unique_ptr<CpuAttention> cpu_;
  std::unique_ptr<TurnProgress[]> turns_;
  StepContext step_;
};

// What a worker does not get to, as one whose core the system has given away, others attend to: it
// keeps what it has begun with.
TEST_F(CpuAttentionTest, AWorkerThatIsHeldUpKeepsWhatItHasBegunWith) {
  Make({.num_kv_heads = 2, .k_dim = 128, .v_dim = 128}, 2);
  static std::atomic<int> held_blocks;
  static std::atomic<bool> is_let_go;
  held_blocks = 0;
  is_let_go = false;
  // The first call is held until the other worker has done all that it can.
  constexpr kernels::AttentionVariant kHeld = {
      "held", CpuIsa::kGeneric, kernels::AttentionProducts::kBf16,
      [](const kernels::AttentionPartialArgs& args) {
        int none = 0;
        if (!args.blocks.empty() &&
            held_blocks.compare_exchange_strong(none, static_cast<int>(args.blocks.size()))) {
          while (!is_let_go) std::this_thread::yield();
        }
        kernels::AttentionPartialAmxEmulated(args);
      }};
  Start(2, KvDtype::kF32, kHeld);
  std::thread held([&] { cpu_->RunWorker(0, step_); });
  while (held_blocks == 0) std::this_thread::yield();
  cpu_->RunWorker(1, step_);
  const int64_t reported = turns_[0].cpu_reported;
  is_let_go = true;
  held.join();
  const int64_t all = attention_.runs.swing.num_blocks();
  EXPECT_EQ(reported, all - held_blocks / 2);  // Two heads a block
  EXPECT_LT(held_blocks / 2, all / 4);
  EXPECT_EQ(turns_[0].cpu_reported, all);
  ExpectAsOneCall();
}

TEST_F(CpuAttentionTest, ClaimsOfLatentsAreAsOneCall) {
  Make({.num_kv_heads = 1, .k_dim = 96, .v_dim = 64, .value_in_key = true}, 5);
  for (const int workers : {1, 3, 8}) RunAndCompare(workers);
  RunAndCompare(3, KvDtype::kBf16);
}

TEST_F(CpuAttentionTest, ClaimsOfPlanesAreAsOneCall) {
  Make({.num_kv_heads = 2, .k_dim = 32, .v_dim = 32}, 6);
  for (const int workers : {1, 3, 8}) RunAndCompare(workers);
  RunAndCompare(3, KvDtype::kBf16);
}

}  // namespace
}  // namespace writescope::attention
