// Each processor touches its own memory and no other: what the other side owns is made unreadable
// while one side runs. A wrong read ends the test with a signal.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <set>

#include "engine/attention/cpu_attention.h"
#include "engine/attention/link_pump.h"
#include "tests/support/attention_scenes.h"

namespace writescope::attention {
namespace {

using kvcache::RegionKind;
using testing::AddBatch;
using testing::AttentionRig;
using testing::CacheRig;
using testing::DecodeRequest;
using testing::StepOutput;
using testing::StepRequest;

constexpr int64_t kPageBytes = 4096;

// Makes memory unreadable for as long as it lives.
class Forbidden {
 public:
  ~Forbidden() {
    for (const auto& [data, size] : spans_) mprotect(data, size, PROT_READ | PROT_WRITE);
  }
  void Add(std::byte* data, int64_t size_bytes) {
    ASSERT_EQ(reinterpret_cast<uintptr_t>(data) % kPageBytes, 0u);
    ASSERT_EQ(size_bytes % kPageBytes, 0);
    if (size_bytes == 0) return;
    ASSERT_EQ(mprotect(data, static_cast<size_t>(size_bytes), PROT_NONE), 0);
    spans_.emplace_back(data, static_cast<size_t>(size_bytes));
  }
  void AddRegion(const kvcache::BlockTable& blocks, RegionKind kind) {
    const std::span<std::byte> memory = blocks.region(kind).memory();
    Add(memory.data(), static_cast<int64_t>(memory.size()));
  }

 private:
  std::vector<std::pair<std::byte*, size_t>> spans_;
};

class AttentionMemoryTest : public ::testing::Test {
 protected:
  // Blocks of whole pages: 64 tokens x 2 heads x (32 + 32) dims x 4 bytes = 32 KiB.
  static testing::AttentionRigOptions Options(
      const std::array<int64_t, kvcache::kNumRegions>& blocks) {
    return testing::RigOptions(testing::AllShapes()[0], {"", blocks});
  }
  // All blocks of the cache but those that the step attends to. Runs, copies and tails may lie
  // anywhere; what no reader was given, nobody may read.
  static void ForbidOtherBlocks(const kvcache::BlockTable& blocks, const RunList& runs,
                                Forbidden* forbidden) {
    std::set<std::pair<RegionKind, int>> read;
    std::vector<attention::Run> all = runs.device;
    for (const RunQueue* queue : {&runs.stream, &runs.swing, &runs.host}) {
      all.insert(all.end(), queue->runs().begin(), queue->runs().end());
    }
    for (const attention::Run& run : all) {
      for (int i = 0; i < run.num_blocks; ++i) read.insert({run.region, run.first_index + i});
    }
    for (const RegionKind kind : kvcache::kAllRegions) {
      const kvcache::Region& region = blocks.region(kind);
      for (int index = 0; index < region.num_blocks(); ++index) {
        if (read.count({kind, index}) != 0) continue;
        for (int layer = 0; layer < region.num_layers(); ++layer) {
          forbidden->Add(region.Address(layer, index), region.block_bytes());
        }
      }
    }
  }
};

TEST_F(AttentionMemoryTest, AResidentStepLeavesHostMemoryAlone) {
  AttentionRig rig(Options({30, 10, 10, 10}));
  const std::vector<int> slots = AddBatch(rig, 128, {500, 300}, 1);
  const StepRequest request = DecodeRequest(slots, {.cpu_share = 0, .handoff = true});
  const std::vector<testing::PlainOutput> plain = rig.Plain(request);
  Forbidden forbidden;
  for (const RegionKind kind : {RegionKind::kStream, RegionKind::kSwing, RegionKind::kHost}) {
    forbidden.AddRegion(rig.cache().blocks(), kind);
  }
  const StepOutput output = rig.Run(request);
  ASSERT_TRUE(output.status.ok());
  EXPECT_EQ(output.stats.spilled_bytes, 0);
  EXPECT_LE(rig.Compare(output, plain).ratio, 1);
}

TEST_F(AttentionMemoryTest, AStepReadsNobodyElsesBlocks) {
  AttentionRig rig(Options({4, 10, 16, 10}));
  const std::vector<int> slots = AddBatch(rig, 128, {500, 300, 700}, 1);
  // The step is of two of the three; the third's blocks and all free ones are out of bounds.
  const std::vector<int> two = {slots[0], slots[1]};
  for (const SharePlan& share :
       {SharePlan{.meet = true, .handoff = true}, SharePlan{.cpu_share = 0.5, .handoff = true},
        SharePlan{.handoff = false}}) {
    StepRequest request = DecodeRequest(two, share);
    const std::vector<testing::PlainOutput> plain = rig.Plain(request);
    Forbidden forbidden;
    request.plant = [&](StepAttention& step) {
      ForbidOtherBlocks(rig.cache().blocks(), step.runs, &forbidden);
    };
    const StepOutput output = rig.Run(request);
    ASSERT_TRUE(output.status.ok());
    EXPECT_LE(rig.Compare(output, plain).ratio, 1);
  }
}

// One side of a step by itself, over memory of which it may read only its part.
class OneSideTest : public AttentionMemoryTest {
 protected:
  OneSideTest() : rig_(Options({4, 10, 16, 10})), slots_(AddBatch(rig_, 128, {500, 300, 700}, 1)) {
    for (const int slot : slots_) {
      int workspace_used = 0;
      plans_.push_back(*rig_.cache().Prepare(slot, 1, &workspace_used));
    }
    std::vector<StepSequence> sequences;
    for (size_t i = 0; i < plans_.size(); ++i) {
      sequences.push_back({.plan = &plans_[i], .first_row = static_cast<int>(i)});
    }
    attention_ =
        BuildStepAttention(rig_.cache().cache(), sequences, RunOrder::kByReader, -1, nullptr);
    num_layers_ = rig_.options().cache.num_layers;
    turns_.reset(new TurnProgress[static_cast<size_t>(num_layers_)]);
    context_.micro_batches = {&attention_, 1};
    context_.blocks = &rig_.cache().blocks();
    context_.num_turns = num_layers_;
    context_.epoch = 1;
    context_.handoff = true;
    context_.turns = turns_.get();
    EXPECT_GE(attention_.runs.device.size(), 1u);
    EXPECT_GE(attention_.runs.stream.num_blocks(), 1);
    EXPECT_GE(attention_.runs.swing.num_blocks(), 4);
    EXPECT_GE(attention_.runs.host.num_blocks(), 1);
  }
  void ResetCursors(int64_t cut) {
    for (int layer = 0; layer < num_layers_; ++layer) {
      TurnProgress& progress = turns_[static_cast<size_t>(layer)];
      progress.swing.Reset(attention_.runs.swing.num_blocks(), cut);
      progress.host_claimed = 0;
      progress.cpu_reported = 0;
    }
  }
  void ForbidBlocks(const std::vector<attention::Run>& runs, Forbidden* forbidden) {
    for (const attention::Run& run : runs) {
      const kvcache::Region& region = rig_.cache().blocks().region(run.region);
      for (int layer = 0; layer < num_layers_; ++layer) {
        forbidden->Add(region.Address(layer, run.first_index),
                       run.num_blocks * region.block_bytes());
      }
    }
  }
  void ForbidTails(Forbidden* forbidden) {
    for (const StepAttention::Open& open : attention_.open) {
      // Whole halves, all layers.
      forbidden->Add(open.span.address.base,
                     open.span.address.stride_bytes * open.span.address.period);
    }
  }
  // Runs the CPU's part of the step alone.
  void RunCpu(int64_t cut) {
    auto cpu = CpuAttention::Create({.geometry = rig_.options().cache.geometry,
                                     .max_turns = num_layers_,
                                     .num_heads = rig_.options().num_heads,
                                     .max_rows = static_cast<int>(slots_.size()),
                                     .num_workers = 1},
                                    rig_.cache().device());
    ASSERT_TRUE(cpu.ok()) << cpu.status();
    ResetCursors(cut);
    // The front is the pump's; here it is simply claimed.
    for (int layer = 0; layer < num_layers_; ++layer) {
      turns_[static_cast<size_t>(layer)].swing.ClaimFront(cut);
      (*cpu)->flags()[layer].query_ready.store(1);
    }
    context_.flags = (*cpu)->flags();
    (*cpu)->RunWorker(0, context_);
    for (int layer = 0; layer < num_layers_; ++layer) {
      EXPECT_EQ((*cpu)->flags()[layer].cpu_done.load(), 1u);
      EXPECT_EQ(turns_[static_cast<size_t>(layer)].cpu_reported.load(),
                attention_.runs.host.num_blocks() + attention_.runs.swing.num_blocks() - cut);
    }
  }

  AttentionRig rig_;
  std::vector<int> slots_;
  std::vector<kvcache::WritePlan> plans_;
  StepAttention attention_;
  int num_layers_ = 0;
  std::unique_ptr<TurnProgress[]> turns_;
  StepContext context_;
};

TEST_F(OneSideTest, WorkersReadOnlyHostAndTheirSideOfTheCut) {
  const int64_t swing_blocks = attention_.runs.swing.num_blocks();
  for (const int64_t cut : {int64_t{0}, int64_t{1}, swing_blocks / 2, swing_blocks}) {
    Forbidden forbidden;
    forbidden.AddRegion(rig_.cache().blocks(), RegionKind::kDevice);
    forbidden.AddRegion(rig_.cache().blocks(), RegionKind::kStream);
    ForbidTails(&forbidden);
    std::vector<attention::Run> front;
    attention_.runs.swing.Slice(0, cut, &front);
    ForbidBlocks(front, &forbidden);
    RunCpu(cut);
  }
}

TEST_F(OneSideTest, PumpReadsOnlyStreamAndItsSideOfTheCut) {
  const KvGeometry& kv = rig_.options().cache.geometry;
  const int64_t swing_blocks = attention_.runs.swing.num_blocks();
  for (const int64_t cut : {int64_t{0}, int64_t{1}, swing_blocks / 2, swing_blocks}) {
    auto pump = LinkPump::Create(
        {.geometry = kv, .ring_bytes = 8 * kv.block_bytes(), .wait_limit = absl::Seconds(5)},
        rig_.cache().device());
    ASSERT_TRUE(pump.ok()) << pump.status();
    ResetCursors(cut);
    std::vector<HandoffFlags> flags(static_cast<size_t>(num_layers_));
    context_.flags = flags.data();
    Forbidden forbidden;
    forbidden.AddRegion(rig_.cache().blocks(), RegionKind::kHost);
    ForbidTails(&forbidden);
    std::vector<attention::Run> back;
    attention_.runs.swing.Slice(cut, swing_blocks - cut, &back);
    ForbidBlocks(back, &forbidden);
    (*pump)->Start(&context_);
    int64_t blocks = 0;
    for (int ended = 0; ended < num_layers_;) {
      const std::optional<Wave> wave = (*pump)->NextWave();
      ASSERT_TRUE(wave.has_value());
      ended += wave->end_of_turn;
      for (const ops::AttendSpan& span : wave->spans) blocks += span.num_blocks;
      ASSERT_TRUE(wave->landed.Wait(absl::Seconds(5)).ok());
      if (wave->slot >= 0) (*pump)->Release(wave->slot, {});
    }
    EXPECT_TRUE((*pump)->AwaitDone(absl::Seconds(5)));
    ASSERT_TRUE(rig_.cache().device().upload().Record().Wait(absl::Seconds(5)).ok());
    EXPECT_EQ(blocks, num_layers_ * (attention_.runs.stream.num_blocks() + cut));
  }
}

// The planted bug: a worker that is given a block of the other side does not get away with it.
TEST_F(OneSideTest, AWrongReadEndsTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(
      {
        Forbidden forbidden;
        forbidden.AddRegion(rig_.cache().blocks(), RegionKind::kStream);
        attention_.runs.host.Add(attention_.runs.stream.runs().front());
        RunCpu(attention_.runs.swing.num_blocks());
      },
      "");
}

}  // namespace
}  // namespace writescope::attention
