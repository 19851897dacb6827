// The maps that turn tiles into operands of warpgroup products, without a GPU: operands are built
// lane by lane, as the kernel does it, and read where the PTX manual says that the products read.
#include "engine/kernels/cuda/attend_warpgroup_maps.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <set>
#include <vector>

namespace writescope::kernels {
namespace {

constexpr int kDims = 128;
constexpr int kSectorBytes = 32;

// An operand of rows of 128 bytes with the 128-byte swizzle of the PTX manual ("canonical
// layouts"): value k of a row; shares nothing with the maps under test.
int SwizzledIndex(int row, int k) {
  const int byte = row / 8 * 1024 + row % 8 * 128 + k * 2;
  return (byte ^ ((byte >> 7 & 7) << 4)) / 2;
}

// What a warp does: words of 16 operand rows, from word `from` of the plane on.
struct Task {
  int from;
  int row_words;
  int slab;  // Values
  int first_row;
  int first_chunk;  // Of the plane's rows
};

// Does the tasks of a block and checks that loads and stores are of whole sectors.
std::vector<uint16_t> BuildOperand(const std::vector<uint16_t>& plane,
                                   const std::vector<Task>& tasks) {
  std::vector<uint16_t> operand(plane.size());
  std::set<int> written;
  for (const Task& task : tasks) {
    for (int c = 0; c < 4; ++c) {
      std::set<int> stored;
      for (int i = 0; i < 4; ++i) {
        std::set<int> loaded;
        for (int lane = 0; lane < kWarpLanes; ++lane) {
          const int word = task.from + ChunkWord(lane, task.first_chunk / 2 + c, i, task.row_words);
          const int to =
              task.slab * 2 + OperandByte(task.first_row + OperandRow(lane), OperandChunk(lane, c));
          std::memcpy(&operand[static_cast<size_t>(to / 2 + 2 * i)],
                      &plane[static_cast<size_t>(word * 2)], 4);
          loaded.insert(word * 4 / kSectorBytes);
          stored.insert(to / kSectorBytes);
          EXPECT_EQ(to % kChunkBytes, 0);
          EXPECT_EQ(written.insert(to).second, i == 0) << "byte " << to;
        }
        EXPECT_EQ(loaded.size(), size_t{kWarpLanes * 4 / kSectorBytes});
      }
      EXPECT_EQ(stored.size(), size_t{kWarpLanes * kChunkBytes / kSectorBytes});
    }
  }
  EXPECT_EQ(written.size() * kChunkBytes, plane.size() * 2);
  return operand;
}

uint16_t ValueOf(int token, int dim) { return static_cast<uint16_t>(token * kDims + dim); }

TEST(AttendWarpgroupMaps, KeysBecomeAnOperand) {
  std::vector<uint16_t> plane(kBlockTokens * kDims);
  for (int token = 0; token < kBlockTokens; ++token) {
    for (int dim = 0; dim < kDims; ++dim) {
      plane[static_cast<size_t>(KIndex(token, dim, kDims, 2))] = ValueOf(token, dim);
    }
  }
  std::vector<Task> tasks;
  for (int tile = 0; tile < kTilesPerBlock; ++tile) {
    for (int slab = 0; slab < 2; ++slab) {
      tasks.push_back({.from = tile * kTileTokens * kDims / 2,
                       .row_words = kTileTokens,
                       .slab = slab * kKeySlabBytes / 2,
                       .first_row = tile * kTileTokens,
                       .first_chunk = slab * kOperandRowChunks});
    }
  }
  const std::vector<uint16_t> operand = BuildOperand(plane, tasks);
  for (int token = 0; token < kBlockTokens; ++token) {
    for (int dim = 0; dim < kDims; ++dim) {
      const int slab = dim / kOperandRowValues * kKeySlabBytes / 2;
      EXPECT_EQ(operand[static_cast<size_t>(slab + SwizzledIndex(token, dim % kOperandRowValues))],
                ValueOf(token, dim));
    }
  }
}

TEST(AttendWarpgroupMaps, ValuesBecomeAnOperand) {
  std::vector<uint16_t> plane(kBlockTokens * kDims);
  for (int token = 0; token < kBlockTokens; ++token) {
    for (int dim = 0; dim < kDims; ++dim) {
      plane[static_cast<size_t>(VIndex(token, dim, kDims, 2))] = ValueOf(token, dim);
    }
  }
  std::vector<Task> tasks;
  for (int row = 0; row < kDims; row += kWarpOperandRows) {
    tasks.push_back(
        {.from = row, .row_words = kDims, .slab = 0, .first_row = row, .first_chunk = 0});
  }
  const std::vector<uint16_t> operand = BuildOperand(plane, tasks);
  for (int token = 0; token < kBlockTokens; ++token) {
    for (int dim = 0; dim < kDims; ++dim) {
      EXPECT_EQ(operand[static_cast<size_t>(SwizzledIndex(dim, token))], ValueOf(token, dim));
    }
  }
}

// Word a of the A operand holds, for lane 4g + t, row g + 8 (a % 2) and columns 2t, 2t + 1 of the
// first or, from a = 2 on, of the second eight tokens.
TEST(AttendWarpgroupMaps, ScoresAreTheWeightsOfTheirLane) {
  for (int lane = 0; lane < kWarpLanes; ++lane) {
    const int g = lane >> 2, t = lane % 4;
    for (int step = 0; step < 8; ++step) {
      for (int a = 0; a < 4; ++a) {
        for (int half = 0; half < 2; ++half) {
          const int i = WeightIndex(step, a, half);
          EXPECT_EQ(AccumulatorRow(lane, i % 4), g + 8 * (a % 2));
          EXPECT_EQ(ProductColumn(lane, i), 16 * step + 8 * (a / 2) + 2 * t + half);
        }
      }
    }
  }
}

}  // namespace
}  // namespace writescope::kernels
