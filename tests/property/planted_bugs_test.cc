// The bugs that the split tests exist for, planted one at a time: each must be seen, by the layer
// of tests that claims to see it and with room to spare.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "tests/support/attention_scenes.h"
#include "tests/support/seed.h"

namespace writescope {
namespace {

using attention::RunQueue;
using attention::StepAttention;
using kvcache::RegionKind;
using testing::AddBatch;
using testing::AttentionRig;
using testing::DecodeRequest;
using testing::PlainOutput;
using testing::Shape;
using testing::StepOutput;
using testing::StepRequest;
using testing_support::TestSeed;

// The worst error as a part of the bound that holds for an engine which rounds probabilities to
// bf16: the one an accelerator is held to.
double WorstAgainstBf16(const AttentionRig& rig, const StepOutput& output,
                        const std::vector<PlainOutput>& plain, bool six_sigma) {
  double worst = 0;
  for (size_t i = 0; i < plain.size(); ++i) {
    for (int d = 0; d < rig.v_dim(); ++d) {
      const double error =
          std::fabs(output.out[i * static_cast<size_t>(rig.v_dim()) + static_cast<size_t>(d)] -
                    plain[i].out[static_cast<size_t>(d)]);
      const double bound =
          six_sigma ? testing::Bf16SixSigma(plain[i], d) : testing::Bf16Bound(plain[i], d);
      worst = std::max(worst, error / bound);
    }
  }
  return worst;
}

class PlantedBugsTest : public ::testing::TestWithParam<Shape> {
 protected:
  PlantedBugsTest() : rig_(testing::RigOptions(GetParam(), {"", {3, 6, 12, 6}})) {
    // Flat logits: the layer in which a lost token weighs most against the rounding.
    rig_.SetQueries(testing::RandomQueries(TestSeed(), rig_.k_dim(), 0.3));
    slots_ = AddBatch(rig_, 128, {700, 450}, TestSeed());
    request_ = DecodeRequest(slots_, {.cpu_share = 0.6, .handoff = true});
    plain_ = rig_.Plain(request_);
  }
  // Runs with the bug and without; `undo` puts memory right again.
  void ExpectSeen(const std::function<void(StepAttention&)>& bug, bool sparse = false) {
    const StepOutput right = rig_.Run(request_);
    ASSERT_TRUE(right.status.ok());
    ASSERT_LE(rig_.Compare(right, plain_).ratio, 1);
    ASSERT_LE(WorstAgainstBf16(rig_, right, plain_, true), 1);
    ASSERT_LE(WorstAgainstBf16(rig_, right, plain_, false), 1);
    StepRequest wrong = request_;
    wrong.plant = bug;
    const StepOutput output = rig_.Run(wrong);
    ASSERT_TRUE(output.status.ok()) << output.status;
    // The float tolerance sees everything, by far.
    EXPECT_GT(rig_.Compare(output, plain_).ratio, 20);
    if (!sparse) {
      EXPECT_GT(WorstAgainstBf16(rig_, output, plain_, true), 2);
    }
  }
  // A block of the middle of the sequence that lies in this region.
  kvcache::BlockPlace SomePlace(const StepAttention& step, RegionKind kind) {
    for (const RunQueue* queue : {&step.runs.stream, &step.runs.swing, &step.runs.host}) {
      for (const attention::Run& run : queue->runs()) {
        if (run.region == kind) return {kind, run.first_index};
      }
    }
    for (const attention::Run& run : step.runs.device) {
      if (kind == RegionKind::kDevice) return {kind, run.first_index};
    }
    ADD_FAILURE() << "no block in region " << kvcache::RegionName(kind);
    return {};
  }
  std::byte* Plane(const kvcache::BlockPlace& place, int layer) {
    return rig_.cache().blocks().region(place.region).Address(layer, place.index);
  }
  // Exchanges the stored values of two tokens of a block, of the keys alone or of the values alone.
  void SwapTokens(std::byte* block, int a, int b, bool keys) {
    const KvGeometry& kv = GetParam().geometry;
    const int words = KvWordValues(kv.dtype);
    const size_t bytes = static_cast<size_t>(KvDtypeBytes(kv.dtype));
    for (int head = 0; head < kv.num_kv_heads; ++head) {
      std::byte* plane = block + head * kv.head_bytes() + (keys ? 0 : kv.k_plane_bytes());
      for (int d = 0; d < (keys ? kv.k_dim : kv.v_dim); ++d) {
        const auto at = [&](int token) {
          return plane + static_cast<int64_t>(bytes) * (keys ? KIndex(token, d, kv.k_dim, words)
                                                             : VIndex(token, d, kv.v_dim, words));
        };
        std::swap_ranges(at(a), at(a) + bytes, at(b));
      }
    }
  }

  AttentionRig rig_;
  std::vector<int> slots_;
  StepRequest request_;
  std::vector<PlainOutput> plain_;
};

TEST_P(PlantedBugsTest, LostToken) {
  ExpectSeen([](StepAttention& step) { --step.open.back().span.num_tokens; });
}

TEST_P(PlantedBugsTest, LostTokenInASealedBlockOfEachRegion) {
  // A key so far off that its token has no weight.
  for (const RegionKind kind : kvcache::kAllRegions) {
    std::vector<std::byte> saved;
    std::byte* block = nullptr;
    const KvGeometry& kv = GetParam().geometry;
    ExpectSeen([&](StepAttention& step) {
      block = Plane(SomePlace(step, kind), 1);
      saved.assign(block, block + kv.block_bytes());
      // Token 5 gives its place to a second token 6.
      const int words = KvWordValues(kv.dtype);
      const size_t bytes = static_cast<size_t>(KvDtypeBytes(kv.dtype));
      for (int d = 0; d < kv.k_dim; ++d) {
        std::memcpy(block + static_cast<int64_t>(bytes) * KIndex(5, d, kv.k_dim, words),
                    block + static_cast<int64_t>(bytes) * KIndex(6, d, kv.k_dim, words), bytes);
      }
      for (int d = 0; !kv.value_in_key && d < kv.v_dim; ++d) {
        std::byte* plane = block + kv.k_plane_bytes();
        std::memcpy(plane + static_cast<int64_t>(bytes) * VIndex(5, d, kv.v_dim, words),
                    plane + static_cast<int64_t>(bytes) * VIndex(6, d, kv.v_dim, words), bytes);
      }
    });
    std::memcpy(block, saved.data(), saved.size());
  }
}

// Two tokens of a word change places in the values and not in the keys. Where key and value are one
// a swapped pair is the same set, and right.
using PlantedSwapTest = PlantedBugsTest;

TEST_P(PlantedSwapTest, SwappedPair) {
  for (const RegionKind kind : kvcache::kAllRegions) {
    std::byte* block = nullptr;
    // Flat logits hide a swap by their flatness; the float tolerance sees it.
    ExpectSeen(
        [&](StepAttention& step) {
          block = Plane(SomePlace(step, kind), 0);
          for (int pair = 0; pair < kBlockTokens; pair += 2) {
            SwapTokens(block, pair, pair + 1, /*keys=*/false);
          }
        },
        /*sparse=*/true);
    for (int pair = 0; pair < kBlockTokens; pair += 2) {
      SwapTokens(block, pair, pair + 1, /*keys=*/false);
    }
  }
}

TEST_P(PlantedBugsTest, StaleTile) {
  for (const RegionKind kind : kvcache::kAllRegions) {
    const KvGeometry& kv = GetParam().geometry;
    const int64_t tile_bytes = kv.k_plane_bytes() / kTilesPerBlock;
    std::vector<std::byte> saved;
    std::byte* block = nullptr;
    ExpectSeen([&](StepAttention& step) {
      // The third tile of the keys is still that of the layer before.
      const kvcache::BlockPlace place = SomePlace(step, kind);
      block = Plane(place, 1);
      saved.assign(block, block + kv.block_bytes());
      std::memcpy(block + 2 * tile_bytes, Plane(place, 0) + 2 * tile_bytes,
                  static_cast<size_t>(tile_bytes));
    });
    std::memcpy(block, saved.data(), saved.size());
  }
}

// The queue with one of its runs changed.
RunQueue Changed(const RunQueue& queue, size_t which,
                 const std::function<void(attention::Run&)>& change) {
  RunQueue changed;
  for (size_t i = 0; i < queue.runs().size(); ++i) {
    attention::Run run = queue.runs()[i];
    if (i == which) change(run);
    changed.Add(run);
  }
  return changed;
}

TEST_P(PlantedBugsTest, WrongRunBorder) {
  for (RunQueue attention::RunList::*queue :
       {&attention::RunList::stream, &attention::RunList::swing, &attention::RunList::host}) {
    // One block beside where it should be, at the beginning and at the end.
    ExpectSeen([&](StepAttention& step) {
      step.runs.*queue = Changed(step.runs.*queue, 0, [](attention::Run& run) {
        run.first_index += run.first_index == 0 ? 1 : -1;
      });
    });
    // One block short, and one counted twice.
    ExpectSeen([&](StepAttention& step) {
      const size_t last = (step.runs.*queue).runs().size() - 1;
      RunQueue changed = Changed(step.runs.*queue, last, [](attention::Run&) {});
      changed.Add((step.runs.*queue).runs().back());
      step.runs.*queue = changed;
    });
  }
  ExpectSeen([&](StepAttention& step) {
    // The border between two runs of the swing list, a block too far.
    const std::vector<attention::Run> runs = step.runs.swing.runs();
    ASSERT_GE(runs.size(), 2u);
    for (size_t i = 0; i < runs.size(); ++i) {
      if (runs[i].num_blocks < 2) continue;
      step.runs.swing = Changed(step.runs.swing, i, [](attention::Run& run) { --run.num_blocks; });
      return;
    }
    ADD_FAILURE() << "no run of two blocks";
  });
}

TEST_P(PlantedBugsTest, WrongReader) {
  ExpectSeen([](StepAttention& step) {
    for (int& reader : step.runs.readers) reader = 0;
  });
}

INSTANTIATE_TEST_SUITE_P(Shapes, PlantedBugsTest, ::testing::ValuesIn(testing::AllShapes()),
                         [](const auto& info) { return info.param.name; });
INSTANTIATE_TEST_SUITE_P(Shapes, PlantedSwapTest, ::testing::ValuesIn(testing::GroupedShapes()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace writescope
