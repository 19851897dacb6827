// The plans of attention on the GPU, without a GPU: who attends to what, and where it is folded.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <tuple>

#include "engine/base/units.h"
#include "engine/ops/cuda/attend_plan.h"
#include "tests/support/seed.h"

namespace writescope::ops {
namespace {

using kernels::FoldPart;
using kernels::FoldRow;
using kernels::KvSpan;
using kernels::Panel;
using kernels::SliceSizes;
using kernels::TileReader;
using kernels::TileSizes;

struct Call {
  AttendArgs args;
  std::vector<AttendSpan> spans;
  std::vector<int> readers;
  std::vector<ReaderRows> rows;
};

// Spans at made-up addresses: nobody reads them.
Call RandomCall(int num_kv_heads, int group, int max_rows, std::mt19937_64& rng) {
  Call call;
  call.args.kv = {.num_kv_heads = num_kv_heads, .k_dim = 64, .v_dim = 64};
  call.args.num_heads = num_kv_heads * group;
  int next_row = 0;
  for (int r = 0; r < 12; ++r) {
    const int num_rows = 1 + static_cast<int>(rng() % max_rows);
    call.rows.push_back({next_row, num_rows, static_cast<int64_t>(rng() % 500)});
    next_row += num_rows;
  }
  for (uint64_t s = 1; s <= 40; ++s) {
    const int64_t tokens = static_cast<int64_t>(rng() % 700);
    AttendSpan span = {.base = reinterpret_cast<const std::byte*>(s << 32),
                       .num_blocks = static_cast<int>(CeilDiv(tokens, kBlockTokens)),
                       .num_tokens = tokens,
                       .first_position = static_cast<int64_t>(rng() % 400),
                       .first_reader = static_cast<int>(call.readers.size()),
                       .num_readers = static_cast<int>(rng() % 6)};
    std::vector<int> all(call.rows.size());
    for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int>(i);
    std::shuffle(all.begin(), all.end(), rng);
    call.readers.insert(call.readers.end(), all.begin(), all.begin() + span.num_readers);
    call.spans.push_back(span);
  }
  call.args.spans = call.spans;
  call.args.readers = call.readers;
  call.args.rows = call.rows;
  return call;
}

// Row, head of the group, span (by address) and block of it.
using Work = std::tuple<int, int, uintptr_t, int>;

// What has to be attended to: blocks of which the row sees a token.
std::set<Work> WantedWork(const Call& call, int group, int min_rows, int max_rows) {
  std::set<Work> wanted;
  for (const AttendSpan& span : call.spans) {
    for (int i = 0; i < span.num_readers; ++i) {
      const ReaderRows& rows = call.rows[call.readers[span.first_reader + i]];
      if (rows.num_rows < min_rows || rows.num_rows > max_rows) continue;
      for (int row = 0; row < rows.num_rows; ++row) {
        for (int block = 0; block < span.num_blocks; ++block) {
          if (rows.first_position + row < span.first_position + block * kBlockTokens) continue;
          for (int head = 0; head < group; ++head) {
            wanted.insert(
                {rows.first_row + row, head, reinterpret_cast<uintptr_t>(span.base), block});
          }
        }
      }
    }
  }
  return wanted;
}

// Does the work of a pass as the kernels do, chunk by chunk; notes who left which partial and
// checks that folds take each once, at the right place.
void RunPass(const Call& call, const SliceSizes& sizes, std::span<const std::byte> arrays,
             const SliceLimits& limits, std::multiset<Work>* done) {
  ASSERT_EQ(static_cast<int64_t>(arrays.size()), SliceArrayBytes(sizes));
  ASSERT_LE(static_cast<int64_t>(arrays.size()), limits.max_array_bytes);
  ASSERT_LE(int64_t{NumSlices(sizes)} * call.args.kv.num_kv_heads * sizes.num_slots,
            limits.max_partials);
  const kernels::SliceArrays at = FindSliceArrays(arrays.data(), sizes);
  std::map<std::pair<int, int>, std::pair<int, int>> partials;  // (slice, slot) to (row, head)
  for (int chunk = 0; chunk < sizes.num_chunks; ++chunk) {
    ASSERT_LT(ChunkBegin(sizes, chunk), ChunkBegin(sizes, chunk + 1));
    for (int block = ChunkBegin(sizes, chunk); block < ChunkBegin(sizes, chunk + 1); ++block) {
      ASSERT_EQ(ChunkOf(sizes, block), chunk);
      int p = 0;
      while (p + 1 < sizes.num_panels && at.panels[p + 1].first_block <= block) ++p;
      const Panel& panel = at.panels[p];
      const int in_span = block - panel.first_block;
      ASSERT_LT(in_span * kBlockTokens, panel.span.num_tokens);
      ASSERT_LE(panel.num_rows * panel.num_heads, sizes.num_slots);
      for (int slot = 0; slot < panel.num_rows * panel.num_heads; ++slot) {
        const kernels::PanelRow& row = at.rows[panel.first_row + slot / panel.num_heads];
        const int head = panel.first_head + slot % panel.num_heads;
        partials[{chunk + p, slot}] = {row.row, head};
        // A panel's rows go on to the last block that any of them sees.
        if (row.visible <= panel.span.first_position + in_span * kBlockTokens) continue;
        done->insert({row.row, head, reinterpret_cast<uintptr_t>(panel.span.base), in_span});
      }
    }
  }
  for (int f = 0; f < sizes.num_folds; ++f) {
    const FoldRow& fold = at.folds[f];
    int num_slices = 0;
    for (int i = fold.first_part; i < fold.first_part + fold.num_parts; ++i) {
      const FoldPart& part = at.parts[i];
      num_slices += part.num_slices;
      for (int s = part.first_slice; s < part.first_slice + part.num_slices; ++s) {
        for (int h = 0; h < fold.num_heads; ++h) {
          const auto partial = partials.find({s, part.first_slot + h});
          ASSERT_NE(partial, partials.end());
          EXPECT_EQ(partial->second, std::make_pair(fold.row, fold.first_head + h));
          partials.erase(partial);
        }
      }
    }
    EXPECT_EQ(fold.num_slices, num_slices);
    EXPECT_LE(num_slices, sizes.max_fold_slices);
  }
  for (int p = 0; p < sizes.num_panels; ++p) {
    for (int i = 0; i < at.panels[p].num_rows; ++i) {
      const kernels::PanelRow& row = at.rows[at.panels[p].first_row + i];
      EXPECT_EQ(at.folds[row.fold].row, row.row);
      EXPECT_EQ(at.folds[row.fold].first_head, at.panels[p].first_head);
    }
  }
  EXPECT_TRUE(partials.empty()) << partials.size() << " partials that nobody folds";
}

TEST(SlicePlanner, EveryBlockOfEveryRowIsAttendedToOnce) {
  std::mt19937_64 rng(testing_support::TestSeed());
  SlicePlanner planner;
  for (const int group : {1, 4, 6, 16, 20, 40}) {
    for (const int64_t max_partials : {int64_t{40} * 40 * 2 * 16, int64_t{1} << 30}) {
      for (int repeat = 0; repeat < 10; ++repeat) {
        const Call call = RandomCall(2, group, 5, rng);
        const SliceLimits limits = {.max_partials = max_partials,
                                    .max_array_bytes = repeat % 2 == 0 ? 1 << 20 : 2000,
                                    .max_thread_blocks = 1 + static_cast<int>(rng() % 300),
                                    .min_chunk_blocks = 1 + static_cast<int>(rng() % 3)};
        std::multiset<Work> done;
        planner.Plan(call.args, {.min_rows = 2, .max_rows = 4}, limits,
                     [&](const SliceSizes& sizes, std::span<const std::byte> arrays) {
                       RunPass(call, sizes, arrays, limits, &done);
                     });
        const std::set<Work> wanted = WantedWork(call, group, 2, 4);
        EXPECT_EQ(done.size(), wanted.size()) << "group " << group;
        EXPECT_EQ(std::set<Work>(done.begin(), done.end()), wanted) << "group " << group;
      }
    }
  }
}

TEST(SlicePlanner, ASmallWaveIsOnePassInTheParametersOfTheLaunch) {
  // 2 MiB of Qwen3: 16 blocks of 4 KV heads, one reader.
  const std::vector<AttendSpan> spans = {{.base = nullptr,
                                          .num_blocks = 16,
                                          .num_tokens = 1024,
                                          .first_position = 0,
                                          .first_reader = 0,
                                          .num_readers = 1}};
  const std::vector<int> readers = {0};
  const std::vector<ReaderRows> rows = {{0, 1, 5000}};
  int passes = 0;
  SlicePlanner().Plan({.kv = {.num_kv_heads = 4, .k_dim = 128, .v_dim = 128},
                       .num_heads = 32,
                       .spans = spans,
                       .readers = readers,
                       .rows = rows},
                      {.min_rows = 1, .max_rows = 8},
                      {.max_partials = 32768,
                       .max_array_bytes = 1 << 20,
                       .max_thread_blocks = 264,
                       .min_chunk_blocks = 2},
                      [&](const SliceSizes& sizes, std::span<const std::byte> arrays) {
                        ++passes;
                        EXPECT_EQ(sizes.num_chunks, 8);
                        EXPECT_LE(arrays.size(), static_cast<size_t>(kernels::kInlineBytes));
                      });
  EXPECT_EQ(passes, 1);
}

TEST(SlicePlanner, NothingToReadIsNoPass) {
  SlicePlanner().Plan({.kv = {.num_kv_heads = 1, .k_dim = 32, .v_dim = 32}, .num_heads = 1},
                      {.min_rows = 1, .max_rows = 8}, {.max_partials = 64},
                      [](const SliceSizes&, std::span<const std::byte>) { ADD_FAILURE(); });
}

TEST(TilePlanner, EveryReaderGoesThroughItsSpansInOrder) {
  std::mt19937_64 rng(testing_support::TestSeed());
  TilePlanner planner;
  for (const int64_t max_bytes : {int64_t{500}, int64_t{1} << 20}) {
    for (int repeat = 0; repeat < 20; ++repeat) {
      const Call call = RandomCall(2, 4, 200, rng);
      std::map<int, std::vector<const std::byte*>> got, want;  // By first row
      planner.Plan(
          call.args, {.min_rows = 50, .max_rows = 150},
          {.tile_rows = 128, .max_array_bytes = max_bytes, .max_blocks = 1 << 20, .group = 4},
          [&](const TileSizes& sizes, std::span<const std::byte> arrays) {
            ASSERT_EQ(static_cast<int64_t>(arrays.size()), TileArrayBytes(sizes));
            ASSERT_LE(static_cast<int64_t>(arrays.size()), max_bytes);
            const kernels::TileArrays at = FindTileArrays(arrays.data(), sizes);
            int tiles = 0;
            for (int r = 0; r < sizes.num_readers; ++r) {
              const TileReader& reader = at.readers[r];
              EXPECT_EQ(reader.first_tile, tiles);
              tiles += static_cast<int>(CeilDiv(reader.num_rows * 4, 128));
              for (int s = 0; s < reader.num_spans; ++s) {
                got[reader.first_row].push_back(at.spans[reader.first_span + s].base);
              }
            }
            EXPECT_EQ(tiles, sizes.num_tiles);
          });
      for (const AttendSpan& span : call.spans) {
        if (span.num_tokens == 0) continue;
        for (int i = 0; i < span.num_readers; ++i) {
          const ReaderRows& rows = call.rows[call.readers[span.first_reader + i]];
          if (rows.num_rows < 50 || rows.num_rows > 150) continue;
          if (rows.first_position + rows.num_rows <= span.first_position) continue;
          want[rows.first_row].push_back(span.base);
        }
      }
      EXPECT_EQ(got, want);
    }
  }
}

TEST(TilePlanner, PassesHaveRoomForTheirBlocks) {
  std::mt19937_64 rng(testing_support::TestSeed());
  TilePlanner planner;
  // A block of a reader: its first position, its tokens and where it lies.
  using Block = std::tuple<int, int64_t, int, const std::byte*>;
  for (const int max_blocks : {1, 3, 10, 1000}) {
    for (int repeat = 0; repeat < 20; ++repeat) {
      const Call call = RandomCall(2, 4, 200, rng);
      std::vector<Block> got, want;
      planner.Plan(
          call.args, {.min_rows = 1, .max_rows = 1000},
          {.tile_rows = 128, .max_array_bytes = 1 << 20, .max_blocks = max_blocks},
          [&](const TileSizes& sizes, std::span<const std::byte> arrays) {
            EXPECT_LE(sizes.num_blocks, max_blocks);
            const kernels::TileArrays at = FindTileArrays(arrays.data(), sizes);
            int blocks = 0;
            for (int r = 0; r < sizes.num_readers; ++r) {
              const TileReader& reader = at.readers[r];
              EXPECT_EQ(reader.first_block, blocks);
              for (int s = 0; s < reader.num_spans; ++s) {
                const KvSpan& span = at.spans[reader.first_span + s];
                EXPECT_EQ(span.first_block, blocks);
                for (int first = 0; first < span.num_tokens; first += kBlockTokens, ++blocks) {
                  got.emplace_back(reader.first_row, span.first_position + first,
                                   std::min(kBlockTokens, span.num_tokens - first),
                                   span.base + first / kBlockTokens * call.args.kv.block_bytes());
                }
              }
            }
            EXPECT_EQ(blocks, sizes.num_blocks);
          });
      for (const AttendSpan& span : call.spans) {
        for (int i = 0; i < span.num_readers; ++i) {
          const ReaderRows& rows = call.rows[call.readers[span.first_reader + i]];
          if (rows.first_position + rows.num_rows <= span.first_position) continue;
          for (int64_t first = 0; first < span.num_tokens; first += kBlockTokens) {
            want.emplace_back(rows.first_row, span.first_position + first,
                              std::min<int64_t>(kBlockTokens, span.num_tokens - first),
                              span.base + first / kBlockTokens * call.args.kv.block_bytes());
          }
        }
      }
      std::sort(got.begin(), got.end());
      std::sort(want.begin(), want.end());
      EXPECT_EQ(got, want);
    }
  }
}

}  // namespace
}  // namespace writescope::ops
