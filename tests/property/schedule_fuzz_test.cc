// Either side delayed at any claim: whatever the order in which the pump, the workers and the
// queues come to their work, a step's answer is the plain one, in one micro-batch or in two.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <ostream>
#include <thread>

#include "tests/support/attention_scenes.h"
#include "tests/support/seed.h"

namespace writescope {
namespace {

using attention::Side;
using testing::AddBatch;
using testing::AttentionRig;
using testing::AttentionRigOptions;
using testing::Mix;
using testing::StepOutput;
using testing::StepRequest;
using testing_support::TestSeed;

// Delays a part of the claims: a yield, or a sleep of up to `longest_us`. How often and on which
// side changes from step to step, so that now the one and now the other is far ahead.
class Delays {
 public:
  Delays(uint64_t seed, int longest_us) : seed_(seed), longest_us_(longest_us) {}
  void NextStep() { ++step_; }

  bool operator()(Side side, int turn) {
    const uint64_t at = Mix(Mix(seed_, static_cast<uint64_t>(step_.load())), ++calls_);
    const uint64_t slow_side = Mix(seed_, static_cast<uint64_t>(step_.load())) % 4;
    const bool slow = slow_side == 3 || slow_side == (side == Side::kCpu ? 0u : 1u);
    if (slow && at % 3 == 0) {
      const auto us = static_cast<int64_t>((at >> 8) % static_cast<uint64_t>(longest_us_));
      std::this_thread::sleep_for(std::chrono::microseconds(us));
    } else if ((at >> 4) % 4 == static_cast<uint64_t>(turn % 4)) {
      std::this_thread::yield();
    }
    return true;
  }

 private:
  const uint64_t seed_;
  const int longest_us_;
  std::atomic<int> step_{0};
  std::atomic<uint64_t> calls_{0};
};

struct FuzzCase {
  std::string name;
  testing::PlacementCase placement;
  int64_t ring_blocks;
  int workers;
  bool retention;
};
void PrintTo(const FuzzCase& fuzz, std::ostream* out) { *out << fuzz.name; }

class ScheduleFuzzTest : public ::testing::TestWithParam<FuzzCase> {};

TEST_P(ScheduleFuzzTest, AnyScheduleGivesThePlainAnswer) {
  const FuzzCase& fuzz = GetParam();
  AttentionRigOptions options = testing::RigOptions(testing::AllShapes()[0], fuzz.placement);
  options.cache.num_layers = 3;
  options.ring_blocks = fuzz.ring_blocks;
  options.workers = fuzz.workers;
  options.wait_limit = absl::Seconds(30);
  options.nap = absl::Microseconds(fuzz.workers == 2 ? 0 : 20);
  AttentionRig rig(options);
  // A first tenant leaves holes and, with retention, room on the device.
  const std::vector<int> first = AddBatch(rig, 0, {500}, 11);
  std::vector<int> slots = AddBatch(rig, 128, {330, 129, 250}, 12);
  rig.cache().Remove(first[0]);
  auto delays = std::make_shared<Delays>(TestSeed(), 150);
  rig.hybrid().SetClaimHook([delays](Side side, int turn) { return (*delays)(side, turn); });
  uint64_t random = TestSeed();
  for (int step = 0; step < 120; ++step) {
    delays->NextStep();
    random = Mix(random, 1);
    // Random readers: a step of one, two or all three sequences, in any order.
    std::vector<int> readers;
    for (size_t i = 0; i < slots.size(); ++i) {
      if ((random >> i) % 2 == 0 || i == random / 8 % slots.size()) {
        readers.insert(readers.begin() + static_cast<int64_t>((random >> 5) % (readers.size() + 1)),
                       slots[i]);
      }
    }
    StepRequest request =
        testing::DecodeRequest(readers, {.meet = (random >> 16) % 2 == 0,
                                         .cpu_share = static_cast<double>((random >> 17) % 5) / 4,
                                         .handoff = (random >> 20) % 8 != 0});
    // In one micro-batch, or in two.
    request.first_parts = (random >> 24) % readers.size();
    request.keep = step % 2 == 0;
    request.retain_keep_free = fuzz.retention && step % 5 == 0 ? 1 : -1;
    const std::vector<testing::PlainOutput> plain = rig.Plain(request);
    const StepOutput output = rig.Run(request);
    ASSERT_TRUE(output.status.ok()) << "step " << step << ": " << output.status;
    const AttentionRig::Worst worst = rig.Compare(output, plain);
    ASSERT_LE(worst.ratio, 1) << "step " << step << ": " << worst.where;
    ASSERT_EQ(output.stats.cpu_bytes + output.stats.link_bytes, output.stats.spilled_bytes);
  }
  for (const int slot : slots) EXPECT_EQ(rig.cache().CheckContents(slot), "");
  EXPECT_EQ(rig.cache().blocks().moved_bytes(), 0);
  EXPECT_EQ(rig.cache().CheckLedger(), "");
}

INSTANTIATE_TEST_SUITE_P(
    Cases, ScheduleFuzzTest,
    ::testing::Values(FuzzCase{"AllSwingTinyRing", {"", {0, 0, 24, 0}}, 3, 2, false},
                      FuzzCase{"FourRegionsTinyRing", {"", {3, 7, 12, 7}}, 3, 3, false},
                      FuzzCase{"FourRegionsWideRing", {"", {3, 7, 12, 7}}, 12, 1, false},
                      FuzzCase{"Retention", {"", {9, 5, 12, 5}}, 4, 2, true}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace writescope
