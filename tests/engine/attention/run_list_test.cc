#include "engine/attention/run_list.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "tests/support/seed.h"

namespace writescope::attention {
namespace {

using kvcache::RegionKind;
using testing_support::TestSeed;

using Sequences = std::vector<std::vector<PlacedBlock>>;

// Up to three sequences that share prefixes, scattered over the regions as by a cache in use.
Sequences RandomSequences(std::mt19937_64& random) {
  int next_id = 0;
  std::map<RegionKind, int> next_index;
  const auto fresh = [&] {
    const RegionKind kind = kvcache::kAllRegions[random() % 4];
    int& index = next_index[kind];
    index += random() % 4 == 0 ? 2 : 1;  // Mostly in runs
    PlacedBlock block{.block_id = next_id++, .place = {kind, index}, .retain_index = -1};
    const bool may_retain = kind == RegionKind::kStream || kind == RegionKind::kSwing;
    if (may_retain && random() % 4 == 0) block.retain_index = 100 + index;
    return block;
  };
  Sequences sequences(1 + random() % 4);
  for (size_t i = 0; i < sequences.size(); ++i) {
    if (i > 0 && random() % 3 != 0) {
      const std::vector<PlacedBlock>& other = sequences[random() % i];
      sequences[i].assign(other.begin(),
                          other.begin() + static_cast<int64_t>(random() % (other.size() + 1)));
    }
    // Runs of one region, as placement makes them.
    const int own = static_cast<int>(random() % 8);
    for (int n = 0; n < own; ++n) {
      PlacedBlock block = fresh();
      if (!sequences[i].empty() && random() % 2 == 0) {
        const PlacedBlock& last = sequences[i].back();
        int& index = next_index[last.place.region];
        if (last.place.index == index) {
          block.place = {last.place.region, ++index};
          // Copies mostly follow one another too.
          block.retain_index = last.retain_index < 0 ? -1 : last.retain_index + 1;
          if (block.retain_index >= 0 && random() % 4 == 0) block.retain_index += 7;
          if (random() % 8 == 0) block.retain_index = -1;
        }
      }
      sequences[i].push_back(block);
    }
  }
  return sequences;
}

std::vector<attention::Run> AllRuns(const RunList& list) {
  std::vector<attention::Run> runs = list.device;
  for (const RunQueue* queue : {&list.stream, &list.swing, &list.host}) {
    runs.insert(runs.end(), queue->runs().begin(), queue->runs().end());
  }
  return runs;
}

TEST(RunList, EveryBlockOnceForEachOfItsReaders) {
  std::mt19937_64 random(TestSeed());
  for (int round = 0; round < 2000; ++round) {
    const Sequences sequences = RandomSequences(random);
    const RunList list = BuildRunList(sequences);
    // (reader, region, index, position, copy's index): as the sequences say, and as the runs say.
    std::multiset<std::tuple<int, RegionKind, int, int64_t, int>> want;
    std::set<int> distinct;
    for (size_t reader = 0; reader < sequences.size(); ++reader) {
      for (size_t unit = 0; unit < sequences[reader].size(); ++unit) {
        const PlacedBlock& block = sequences[reader][unit];
        want.insert({static_cast<int>(reader), block.place.region, block.place.index,
                     static_cast<int64_t>(unit) * kBlockTokens, block.retain_index});
        distinct.insert(block.block_id);
      }
    }
    std::multiset<std::tuple<int, RegionKind, int, int64_t, int>> got;
    int64_t blocks = 0;
    for (const attention::Run& run : AllRuns(list)) {
      ASSERT_GT(run.num_blocks, 0);
      blocks += run.num_blocks;
      for (int i = 0; i < run.num_blocks; ++i) {
        for (int r = 0; r < run.num_readers; ++r) {
          got.insert({list.readers[static_cast<size_t>(run.first_reader + r)], run.region,
                      run.first_index + i, run.first_position + int64_t{i} * kBlockTokens,
                      run.retain_index < 0 ? -1 : run.retain_index + i});
        }
      }
    }
    ASSERT_EQ(got, want);
    // A shared block is scheduled, and counted, once.
    ASSERT_EQ(blocks, static_cast<int64_t>(distinct.size()));
    ASSERT_EQ(list.device_blocks() + list.spilled_blocks(), blocks);
  }
}

TEST(RunList, QueuesHoldTheirRegionsAndRetainedBlocksAreStreamed) {
  std::mt19937_64 random(TestSeed());
  for (int round = 0; round < 500; ++round) {
    const RunList list = BuildRunList(RandomSequences(random));
    for (const attention::Run& run : list.device) EXPECT_EQ(run.region, RegionKind::kDevice);
    for (const attention::Run& run : list.host.runs()) EXPECT_EQ(run.region, RegionKind::kHost);
    for (const attention::Run& run : list.swing.runs()) {
      EXPECT_EQ(run.region, RegionKind::kSwing);
      EXPECT_EQ(run.retain_index, -1);
    }
    for (const attention::Run& run : list.stream.runs()) {
      EXPECT_TRUE(run.region == RegionKind::kStream ||
                  (run.region == RegionKind::kSwing && run.retain_index >= 0));
    }
  }
}

// Two runs that could be one would cost a copy more each.
TEST(RunList, RunsOfASequenceAreMaximal) {
  std::mt19937_64 random(TestSeed());
  for (int round = 0; round < 1000; ++round) {
    Sequences one = RandomSequences(random);
    one.resize(1);
    const std::vector<attention::Run> runs = AllRuns(BuildRunList(one));
    for (const attention::Run& a : runs) {
      for (const attention::Run& b : runs) {
        const bool follows =
            a.region == b.region && a.first_index + a.num_blocks == b.first_index &&
            a.first_position + int64_t{a.num_blocks} * kBlockTokens == b.first_position &&
            (a.retain_index < 0 ? b.retain_index < 0
                                : b.retain_index == a.retain_index + a.num_blocks);
        EXPECT_FALSE(follows);
      }
    }
  }
}

// The link takes as long for a call as for some blocks, so what is short is the CPU's first.
TEST(RunList, ShortSwingRunsStandBehindLongOnesWhereThatIsAskedFor) {
  // One has outgrown the device, one lies in two long runs, one has outgrown another long run, and
  // one has grown block by block: its short runs are many.
  const auto blocks = [](std::initializer_list<std::pair<int, int>> runs, int first_id) {
    std::vector<PlacedBlock> placed;
    for (const auto& [first_index, count] : runs) {
      for (int i = 0; i < count; ++i) {
        placed.push_back({.block_id = first_id++, .place = {RegionKind::kSwing, first_index + i}});
      }
    }
    return placed;
  };
  const Sequences sequences{blocks({{901, 1}}, 0), blocks({{300, 16}, {100, 40}}, 100),
                            blocks({{500, 20}, {900, 1}, {700, 14}}, 200),
                            blocks({{950, 8}, {600, 1}, {910, 7}}, 300)};
  const auto order = [&](RunOrder wanted) {
    std::vector<std::pair<int, int>> runs;
    const RunList list = BuildRunList(sequences, wanted);
    for (const attention::Run& run : list.swing.runs()) {
      runs.emplace_back(run.first_index, run.num_blocks);
    }
    return runs;
  };
  using testing::ElementsAre;
  using testing::Pair;
  EXPECT_THAT(order(RunOrder::kShortLast),
              ElementsAre(Pair(300, 16), Pair(100, 40), Pair(500, 20), Pair(950, 8), Pair(600, 1),
                          Pair(910, 7), Pair(700, 14), Pair(900, 1), Pair(901, 1)));
  EXPECT_THAT(order(RunOrder::kByReader),
              ElementsAre(Pair(901, 1), Pair(300, 16), Pair(100, 40), Pair(500, 20), Pair(900, 1),
                          Pair(700, 14), Pair(950, 8), Pair(600, 1), Pair(910, 7)));
}

TEST(RunList, ASharedPrefixIsOneRunAndEndsWhereReadersDiffer) {
  std::vector<PlacedBlock> a;
  for (int i = 0; i < 6; ++i) a.push_back({.block_id = i, .place = {RegionKind::kSwing, i}});
  std::vector<PlacedBlock> b(a.begin(), a.begin() + 4);
  const RunList list = BuildRunList(Sequences{a, b});
  ASSERT_EQ(list.swing.runs().size(), 2u);
  EXPECT_EQ(list.swing.runs()[0].num_blocks, 4);
  EXPECT_EQ(list.swing.runs()[0].num_readers, 2);
  EXPECT_EQ(list.swing.runs()[1].num_blocks, 2);
  EXPECT_EQ(list.swing.runs()[1].num_readers, 1);
  EXPECT_EQ(list.spilled_blocks(), 6);
}

// Blocks of a run, one by one.
std::vector<attention::Run> Blocks(const std::vector<attention::Run>& runs) {
  std::vector<attention::Run> blocks;
  for (const attention::Run& run : runs) {
    for (int i = 0; i < run.num_blocks; ++i) {
      attention::Run block = run;
      block.num_blocks = 1;
      block.first_index += i;
      block.first_position += int64_t{i} * kBlockTokens;
      if (block.retain_index >= 0) block.retain_index += i;
      blocks.push_back(block);
    }
  }
  return blocks;
}
bool Equal(const attention::Run& a, const attention::Run& b) {
  return a.region == b.region && a.first_index == b.first_index && a.num_blocks == b.num_blocks &&
         a.first_position == b.first_position && a.first_reader == b.first_reader &&
         a.num_readers == b.num_readers && a.retain_index == b.retain_index;
}

TEST(RunQueue, EverySliceIsThatPartOfTheConcatenation) {
  std::mt19937_64 random(TestSeed());
  for (int round = 0; round < 200; ++round) {
    const RunList list = BuildRunList(RandomSequences(random));
    for (const RunQueue* queue : {&list.stream, &list.swing, &list.host}) {
      const std::vector<attention::Run> all = Blocks(queue->runs());
      ASSERT_EQ(queue->num_blocks(), static_cast<int64_t>(all.size()));
      for (int64_t first = 0; first <= queue->num_blocks(); ++first) {
        for (int64_t count = 0; first + count <= queue->num_blocks(); ++count) {
          std::vector<attention::Run> parts;
          queue->Slice(first, count, &parts);
          const std::vector<attention::Run> got = Blocks(parts);
          ASSERT_EQ(static_cast<int64_t>(got.size()), count);
          for (int64_t i = 0; i < count; ++i) {
            ASSERT_TRUE(Equal(got[static_cast<size_t>(i)], all[static_cast<size_t>(first + i)]));
          }
          for (const attention::Run& part : parts) ASSERT_GT(part.num_blocks, 0);
        }
      }
    }
  }
}

TEST(RunQueue, SlicesAreAppended) {
  RunQueue queue;
  queue.Add({.region = RegionKind::kSwing, .first_index = 3, .num_blocks = 4});
  std::vector<attention::Run> parts;
  queue.Slice(0, 1, &parts);
  queue.Slice(3, 1, &parts);
  queue.Slice(2, 0, &parts);
  ASSERT_EQ(parts.size(), 2u);
  EXPECT_EQ(parts[1].first_index, 6);
}

TEST(CutForShare, RoundsAndClamps) {
  const auto list = [](int stream, int swing, int host) {
    RunList runs;
    if (stream > 0) runs.stream.Add({.region = RegionKind::kStream, .num_blocks = stream});
    if (swing > 0) runs.swing.Add({.region = RegionKind::kSwing, .num_blocks = swing});
    if (host > 0) runs.host.Add({.region = RegionKind::kHost, .num_blocks = host});
    return runs;
  };
  EXPECT_EQ(CutForShare(list(0, 10, 0), 0), 10);
  EXPECT_EQ(CutForShare(list(0, 10, 0), 1), 0);
  EXPECT_EQ(CutForShare(list(0, 10, 0), 0.3), 7);
  EXPECT_EQ(CutForShare(list(5, 10, 5), 0.5), 5);   // The host's five are the CPU's already.
  EXPECT_EQ(CutForShare(list(5, 10, 5), 0.1), 10);  // Below what host forbids
  EXPECT_EQ(CutForShare(list(5, 10, 5), 0.95), 0);  // Above what stream forbids
  EXPECT_EQ(CutForShare(list(5, 0, 5), 0.5), 0);
  EXPECT_EQ(CutForShare(list(0, 0, 0), 0.5), 0);
  // Never off by more than half a block where nothing clamps.
  for (int step = 0; step <= 1000; ++step) {
    const double share = step / 1000.0;
    const int64_t cut = CutForShare(list(0, 37, 0), share);
    EXPECT_LE(std::abs(static_cast<double>(37 - cut) - 37 * share), 0.5 + 1e-9);
  }
}

}  // namespace
}  // namespace writescope::attention
