// Few slots to an expert, and 4-bit weights, on sm_90: weights and values come through a ring in
// shared memory by bulk copies, which one warp issues far ahead; the other warps multiply. The grid
// is what fits on the GPU at once, and each block takes an equal run of the units of work. In which
// order a sum is taken depends on the matrix alone, not on the slots or the grid.
#include <algorithm>
#include <iterator>
#include <type_traits>

#include "engine/kernels/cuda/async_copy.h"
#include "engine/kernels/cuda/expert_gemm.h"
#include "engine/kernels/cuda/launch.h"
#include "engine/kernels/cuda/tensor_core.h"
#include "engine/kernels/cuda/values.h"
#include "engine/kernels/quantize_int4.h"

namespace writescope::kernels {
namespace {

constexpr int kQuantBytes = kInt4GroupWords * 4;  // Of a row tile's group
constexpr int kScaleBytes = kInt4TileRows * 2;
constexpr int kValueBytes = kInt4GroupCols * 2;  // Of a slot's group

// A unit is kRowTiles tiles of rows (with a gate, half of them are of `up`) by all columns. The
// multiplying warps are kParts times kBands: the parts divide the groups of columns, the bands the
// row tiles. A stage of the ring holds kGroups groups.
//
// Gate and up of the same rows are neighbouring tiles of a warp where a warp has two, else tiles of
// two bands. The warps whose sums meet in a result are a team: those of a band, or of two.
template <int kParts_, int kBands_, int kWarpTiles_, int kSlotTiles_, int kGroups_, int kStages_,
          int kBlocks_>
struct RingShape {
  static constexpr int kParts = kParts_, kBands = kBands_, kWarpTiles = kWarpTiles_;
  static constexpr int kSlotTiles = kSlotTiles_, kGroups = kGroups_, kStages = kStages_;
  static constexpr int kBlocks = kBlocks_;              // On a multiprocessor
  static constexpr int kMultipliers = kParts * kBands;  // Warps
  static constexpr int kThreads = (kMultipliers + 1) * 32;
  static constexpr int kRowTiles = kBands * kWarpTiles;
  static constexpr int kSlots = kSlotTiles * 8;
  template <bool kGated>
  static constexpr int kOutTiles = kGated ? kRowTiles / 2 : kRowTiles;
  // 64 bytes more than what it holds: rows that a warp reads at once begin at other banks.
  static constexpr int kValueStride = kGroups * kValueBytes + 64;
  static constexpr int kScalesAt = kRowTiles * kGroups * kQuantBytes;
  static constexpr int kValuesAt = kScalesAt + kRowTiles * kGroups * kScaleBytes;
  static constexpr int kStageBytes = kValuesAt + kSlots * kValueStride;
  static_assert(kStageBytes % 128 == 0);
  static constexpr bool kPaired = kWarpTiles % 2 == 0;
  template <bool kGated>
  static constexpr int kTeams = kGated && !kPaired ? kBands / 2 : kBands;
  static constexpr int kWarpSums = kWarpTiles * kSlotTiles * 4;  // Of each lane
  static constexpr int kSumsAt = kStages * kStageBytes;
  static constexpr int kSumBytes = kMultipliers * kWarpSums * 32 * 4;
  // What a multiprocessor of sm_90 has, less 1 KiB for each block.
  static constexpr int kMaxBytes = 228 * 1024 / kBlocks - 1024;
  // With two sets of sums a warp may write those of a unit while others read those before.
  static constexpr int kBarrierBytes = 2 * kStages * 8;
  static constexpr int kSumSets = kSumsAt + 2 * kSumBytes + kBarrierBytes <= kMaxBytes ? 2 : 1;
  static constexpr int kBarriersAt = kSumsAt + kSumSets * kSumBytes;
  static constexpr int kSharedBytes = kBarriersAt + kBarrierBytes;
  static_assert(kSharedBytes <= kMaxBytes);
  static_assert(kRingRows % (kRowTiles * kInt4TileRows) == 0);
};

// Eight slots or fewer: two blocks share a multiprocessor, so that one multiplies while the other
// adds up. The narrow units are for matrices that have too few of the others to go round.
using RingFew = RingShape<4, 2, 2, 1, 8, 2, 2>;
using RingFewNarrow = RingShape<4, 2, 1, 1, 8, 3, 2>;
using RingFewShort = RingShape<2, 4, 1, 1, 6, 2, 2>;  // For less than kShortGroups groups
using RingMany = RingShape<4, 4, 1, 2, 8, 3, 1>;
using RingManyShort = RingShape<2, 4, 1, 2, 4, 3, 2>;
constexpr int kShortGroups = 8;

// Where in the ring one is.
template <int kStages>
struct RingPlace {
  int stage = 0;
  uint32_t parity = 0;
  __device__ void Next() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

struct RingUnits {
  int first = 0, end = 0;  // Of this block
  int per_tile = 1;
};

// What one lane of the fetching warp copies of each stage: a row tile's quants or scales, or a
// slot's values.
struct RingCopy {
  const std::byte* base = nullptr;  // Of the first unit of a tile of slots
  int64_t unit_bytes = 0;           // From one unit to the next
  int group_bytes = 0;
  int to = 0;  // In the stage
};

// One warp: fills the ring.
template <typename Shape, bool kGated>
__device__ void FillRing(const ExpertGemmArgs& args, const RingUnits& units, std::byte* shared,
                         uint64_t* full, uint64_t* empty) {
  constexpr int kWeightCopies = 2 * Shape::kRowTiles;
  constexpr int kCopies = (kWeightCopies + Shape::kSlots + 31) / 32;  // Of a lane
  constexpr int kOutTiles = Shape::template kOutTiles<kGated>;
  const int lane = threadIdx.x % 32;
  const int groups = static_cast<int>(Int4Groups(args.cols));
  const int64_t quant_bytes = Int4QuantBytes(args.rows, args.cols);
  RingCopy copies[kCopies];
  ExpertTile tile;
  const uint64_t once = ReadOncePolicy(), keep = KeepPolicy();
  // Of the block's stages, `end` at most: weights, or none before stage `weights_from`; and values.
  const auto fill = [&](int end, int weights_from, bool weights, bool values) {
    RingPlace<Shape::kStages> place;
    int at = units.first / units.per_tile, unit = units.first % units.per_tile;
    int tile_at = -1;
    int stages = 0;
    for (int left = units.end - units.first; left > 0 && stages < end; --left) {
      if (at != tile_at) {
        tile_at = at;
        tile = args.tiles[at];
#pragma unroll
        for (int j = 0; j < kCopies; ++j) {
          const int i = j * 32 + lane;
          RingCopy& copy = copies[j];
          if (i < kWeightCopies) {
            const int m = i % Shape::kRowTiles;
            const bool scales = i >= Shape::kRowTiles;
            copy.group_bytes = scales ? kScaleBytes : kQuantBytes;
            const bool is_up = kGated && (Shape::kPaired ? m % 2 == 1 : m >= kOutTiles);
            const int row_tile = kGated && Shape::kPaired ? m / 2 : m % kOutTiles;
            copy.base = (is_up ? args.up : args.w) + tile.expert * args.expert_stride_bytes +
                        (scales ? quant_bytes : 0) + int64_t{row_tile} * groups * copy.group_bytes;
            copy.unit_bytes = int64_t{kOutTiles} * groups * copy.group_bytes;
            copy.to = (scales ? Shape::kScalesAt : 0) + m * Shape::kGroups * copy.group_bytes;
            // The unit's row tiles lie one after the other where a stage has all groups of them,
            // and are one copy: the lanes' copies are issued one at a time.
            if (!kGated && groups == Shape::kGroups) {
              copy.group_bytes = m == 0 ? Shape::kRowTiles * copy.group_bytes : 0;
            }
          } else if (values && i - kWeightCopies < tile.num_slots) {
            const int slot = tile.first_slot + i - kWeightCopies;
            const int64_t row =
                args.x_by_token ? args.slot_pairs[slot] / args.experts_per_token : slot;
            copy.base = static_cast<const std::byte*>(args.x) + row * args.x_stride * 2;
            copy.unit_bytes = 0;
            copy.group_bytes = kValueBytes;
            copy.to = Shape::kValuesAt + (i - kWeightCopies) * Shape::kValueStride;
          } else {
            copy.group_bytes = 0;
          }
        }
      }
      const std::byte* from[kCopies];
#pragma unroll
      for (int j = 0; j < kCopies; ++j) from[j] = copies[j].base + unit * copies[j].unit_bytes;
      for (int group = 0; group < groups && stages < end; group += Shape::kGroups, ++stages) {
        const int count = min(Shape::kGroups, groups - group);
        const bool with_weights = weights || stages >= weights_from;
        if (stages >= Shape::kStages) WaitBarrier(&empty[place.stage], place.parity ^ 1);
        if (with_weights && lane == 0) {
          ArriveExpecting(&full[place.stage],
                          count * (Shape::kRowTiles * (kQuantBytes + kScaleBytes) +
                                   tile.num_slots * kValueBytes));
        }
        __syncwarp();
        std::byte* stage = shared + place.stage * Shape::kStageBytes;
#pragma unroll
        for (int j = 0; j < kCopies; ++j) {
          const int bytes = count * copies[j].group_bytes;
          const bool is_weight = j * 32 + lane < kWeightCopies;
          if (bytes > 0 && (is_weight ? with_weights : values)) {
            CopyBulk(stage + copies[j].to, from[j], bytes, &full[place.stage],
                     is_weight ? once : keep);
          }
          from[j] += bytes;
        }
        place.Next();
      }
      if (++unit == units.per_tile) {
        unit = 0;
        ++at;
      }
    }
  };
  if (args.tiles_settled) {
    // The first weights are on their way before it is known which values they meet.
    fill(Shape::kStages, 0, true, false);
    WaitForKernelBefore();
  }
  LetNextKernelBegin();
  fill(INT32_MAX, Shape::kStages, !args.tiles_settled, true);
}

// A warp's part of a stage.
template <typename Shape, int kLive>
__device__ void MultiplyStage(const std::byte* weights, const std::byte* scales,
                              const std::byte* values, int count, int part,
                              float (&sums)[Shape::kWarpTiles][Shape::kSlotTiles][4]) {
  for (int g = part; g < count; g += Shape::kParts) {
    float group[Shape::kWarpTiles][kLive][4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint4 x[kLive][2];
#pragma unroll
      for (int n = 0; n < kLive; ++n) {
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          x[n][b] = *reinterpret_cast<const uint4*>(
              values + g * kValueBytes + n * 8 * Shape::kValueStride + half * 128 + b * 64);
        }
      }
#pragma unroll
      for (int m = 0; m < Shape::kWarpTiles; ++m) {
        const uint4 bits = *reinterpret_cast<const uint4*>(weights + g * kQuantBytes +
                                                           m * Shape::kGroups * kQuantBytes +
                                                           half * (kQuantBytes / 2));
        const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          uint32_t a[4];
          UnpackInt4(words[i], a);
#pragma unroll
          for (int n = 0; n < kLive; ++n) {
            const uint4& v = x[n][i / 2];
            if (i % 2 == 0) {
              Mma(a, v.x, v.y, group[m][n]);
            } else {
              Mma(a, v.z, v.w, group[m][n]);
            }
          }
        }
      }
    }
#pragma unroll
    for (int m = 0; m < Shape::kWarpTiles; ++m) {
      const uint32_t scale = *reinterpret_cast<const uint32_t*>(scales + g * kScaleBytes +
                                                                m * Shape::kGroups * kScaleBytes);
      const float low = LowBf16(scale), high = HighBf16(scale);
#pragma unroll
      for (int n = 0; n < kLive; ++n) {
#pragma unroll
        for (int c = 0; c < 4; ++c) sums[m][n][c] += (c < 2 ? low : high) * group[m][n][c];
      }
    }
  }
}

// Where a lane leaves its sums of a unit, and which results it writes: some of its team's.
template <typename Shape, bool kGated>
struct RingTeam {
  static constexpr int kWarps = Shape::kMultipliers / Shape::template kTeams<kGated>;
  static constexpr int kSums = Shape::kSlotTiles * 4;  // Of a lane and a row tile
  static constexpr int kMine = (kSums + kWarps - 1) / kWarps;
  static constexpr int kOutTiles =
      kGated && Shape::kPaired ? Shape::kWarpTiles / 2 : Shape::kWarpTiles;
  static constexpr int kWarpFloats = Shape::kWarpSums * 32;
  int team = 0;
  int write_at = 0;    // In a set of sums
  int read_at[kMine];  // In a set: the first part's, of the first row tile
  int slots[kMine];    // Of the tile; kSlots for none
  int rows[kMine];     // Of the unit

  __device__ RingTeam(int part, int band, int lane) {
    constexpr int kTeams = Shape::template kTeams<kGated>;
    const int member = band / kTeams * Shape::kParts + part;
    team = band % kTeams;
    write_at = (team * kWarps + member) * kWarpFloats + lane;
    Keep(write_at);
#pragma unroll
    for (int j = 0; j < kMine; ++j) {
      // Members next to each other have the same slots, since these may be few.
      const int k = member + j * kWarps;
      const int sum = k / 4 * 4 + k % 2 * 2 + k % 4 / 2;
      read_at[j] = team * kWarps * kWarpFloats + sum * 32 + lane;
      slots[j] = sum < kSums ? sum / 4 * 8 + lane % 4 * 2 + sum % 2 : Shape::kSlots;
      rows[j] = team * kOutTiles * kInt4TileRows + lane / 4 + sum % 4 / 2 * 8;
      Keep(read_at[j]);
      Keep(slots[j]);
      Keep(rows[j]);
    }
  }
  __device__ void Sync() const {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "n"(kWarps * 32) : "memory");
  }

 private:
  // In a register: the compiler would rather compute it again for each unit, and it is instructions
  // that limit the kernel.
  static __device__ void Keep(int& value) { asm volatile("" : "+r"(value)); }
};

// Adds up what the parts have of a unit, and writes it to `out`, the rows of y of this lane's
// slots, each from the unit's first row on.
template <typename Shape, bool kGated>
__device__ void WriteUnit(const RingTeam<Shape, kGated>& team, int num_slots, int first_row,
                          const float (&sums)[Shape::kWarpTiles][Shape::kSlotTiles][4],
                          __nv_bfloat16* const (&out)[RingTeam<Shape, kGated>::kMine], float* set) {
  using Team = RingTeam<Shape, kGated>;
  if (Shape::kSumSets == 1) team.Sync();  // Everybody has read the sums of the unit before.
#pragma unroll
  for (int m = 0; m < Shape::kWarpTiles; ++m) {
#pragma unroll
    for (int i = 0; i < Team::kSums; ++i) {
      set[team.write_at + (m * Team::kSums + i) * 32] = sums[m][i / 4][i % 4];
    }
  }
  team.Sync();
#pragma unroll
  for (int j = 0; j < Team::kMine; ++j) {
    if (team.slots[j] >= num_slots) continue;
    const float* first = set + team.read_at[j];
#pragma unroll
    for (int m = 0; m < Team::kOutTiles; ++m) {
      float value = 0, up = 0;
#pragma unroll
      for (int p = 0; p < Shape::kParts; ++p) {
        const auto sum_at = [&](int member, int tile) {
          return first[member * Team::kWarpFloats + tile * Team::kSums * 32];
        };
        if constexpr (kGated && Shape::kPaired) {
          value += sum_at(p, 2 * m);
          up += sum_at(p, 2 * m + 1);
        } else {
          value += sum_at(p, m);
          if constexpr (kGated) up += sum_at(Shape::kParts + p, m);
        }
      }
      if constexpr (kGated) value = SiLu(value) * up;
      out[j][first_row + m * kInt4TileRows] = __float2bfloat16_rn(value);
    }
  }
}

// The other warps: multiply, and add up.
template <typename Shape, bool kGated>
__device__ void MultiplyUnits(const ExpertGemmArgs& args, const RingUnits& units, std::byte* shared,
                              uint64_t* full, uint64_t* empty) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int part = warp % Shape::kParts, band = warp / Shape::kParts;
  const int groups = static_cast<int>(Int4Groups(args.cols));
  // Where the lane's share lies in a stage.
  const std::byte* lane_weights =
      shared + band * Shape::kWarpTiles * Shape::kGroups * kQuantBytes + lane * 16;
  const std::byte* lane_scales = shared + Shape::kScalesAt +
                                 band * Shape::kWarpTiles * Shape::kGroups * kScaleBytes +
                                 lane / 4 * 4;
  const std::byte* lane_values =
      shared + Shape::kValuesAt + lane / 4 * Shape::kValueStride + lane % 4 * 16;
  RingPlace<Shape::kStages> place;
  int at_tile = units.first / units.per_tile, unit_of_tile = units.first % units.per_tile;
  int tile_at = -1;
  ExpertTile tile = {};
  using Team = RingTeam<Shape, kGated>;
  const Team team(part, band, lane);
  __nv_bfloat16* out[Team::kMine] = {};
  int set = 0;
  for (int left = units.end - units.first; left > 0; --left) {
    if (at_tile != tile_at) {
      tile_at = at_tile;
      tile = args.tiles[tile_at];
#pragma unroll
      for (int j = 0; j < Team::kMine; ++j) {
        const int at = tile.first_slot + min(team.slots[j], tile.num_slots - 1);
        const int64_t row = args.y_by_pair ? args.slot_pairs[at] : at;
        out[j] = static_cast<__nv_bfloat16*>(args.y) + row * args.y_stride + team.rows[j];
      }
    }
    float sums[Shape::kWarpTiles][Shape::kSlotTiles][4] = {};
    for (int group = 0; group < groups; group += Shape::kGroups) {
      WaitBarrier(&full[place.stage], place.parity);
      const int at = place.stage * Shape::kStageBytes;
      const int count = min(Shape::kGroups, groups - group);
      const auto multiply = [&](auto live) {
        MultiplyStage<Shape, decltype(live)::value>(lane_weights + at, lane_scales + at,
                                                    lane_values + at, count, part, sums);
      };
      if (Shape::kSlotTiles == 1 || tile.num_slots <= 8) {
        multiply(std::integral_constant<int, 1>());
      } else {
        multiply(std::integral_constant<int, Shape::kSlotTiles>());
      }
      // Every lane for itself: none has to have read for another to tell so.
      FenceAsyncProxy();
      Arrive(&empty[place.stage]);
      place.Next();
    }
    WriteUnit<Shape, kGated>(
        team, tile.num_slots, unit_of_tile * Shape::template kOutTiles<kGated> * kInt4TileRows,
        sums, out, reinterpret_cast<float*>(shared + Shape::kSumsAt + set * Shape::kSumBytes));
    if (Shape::kSumSets == 2) set ^= 1;
    if (++unit_of_tile == units.per_tile) {
      unit_of_tile = 0;
      ++at_tile;
    }
  }
}

template <typename Shape, bool kGated>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    ExpertGemmRingKernel(const __grid_constant__ ExpertGemmArgs args) {
  extern __shared__ __align__(128) std::byte shared[];
  auto* full = reinterpret_cast<uint64_t*>(shared + Shape::kBarriersAt);
  uint64_t* empty = full + Shape::kStages;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shape::kStages; ++i) {
      InitBarrier(&full[i], 1);
      InitBarrier(&empty[i], Shape::kMultipliers * 32);
    }
    PublishBarriers();
  }
  if (!args.tiles_settled) WaitForKernelBefore();
  // Tiles that have slots come first.
  int tiles = 0;
  for (int first = 0; first < args.num_tiles; first += Shape::kThreads) {
    const int at = first + threadIdx.x;
    tiles += __syncthreads_count(at < args.num_tiles && args.tiles[at].num_slots > 0);
  }
  RingUnits units;
  units.per_tile = args.rows / (Shape::template kOutTiles<kGated> * kInt4TileRows);
  const int total = tiles * units.per_tile, grid = static_cast<int>(gridDim.x);
  // Blocks that begin together on a multiprocessor, of the first and of the second half of the
  // grid, have neighbouring shares: not both of them have a unit more than others.
  const int per_round = grid / Shape::kBlocks;
  const int share = static_cast<int>(blockIdx.x) % per_round * Shape::kBlocks +
                    static_cast<int>(blockIdx.x) / per_round;
  // A share is total * share / grid to the next, without the half microsecond of a division of 64
  // bits, for which everything would wait.
  const int each = total / grid, rest = total % grid;
  units.first = each * share + rest * share / grid;
  units.end = each * (share + 1) + rest * (share + 1) / grid;
  if (threadIdx.x / 32 == Shape::kMultipliers) {
    FillRing<Shape, kGated>(args, units, shared, full, empty);
  } else {
    if (args.tiles_settled) WaitForKernelBefore();
    LetNextKernelBegin();
    MultiplyUnits<Shape, kGated>(args, units, shared, full, empty);
  }
}

template <typename Shape>
cudaError_t Launch(cudaStream_t stream, const ExpertGemmArgs& args) {
  static const cudaError_t allowed = [] {
    for (const auto any :
         {&ExpertGemmRingKernel<Shape, true>, &ExpertGemmRingKernel<Shape, false>}) {
      const cudaError_t error = cudaFuncSetAttribute(
          any, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kSharedBytes);
      if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
  }();
  if (allowed != cudaSuccess) return allowed;
  const auto kernel =
      args.up != nullptr ? &ExpertGemmRingKernel<Shape, true> : &ExpertGemmRingKernel<Shape, false>;
  return LaunchEarly(stream, kernel, NumProcessors() * Shape::kBlocks, Shape::kThreads,
                     Shape::kSharedBytes, args);
}

// Whether wide units are so few that some blocks have one more than others to a notable part. Units
// of few groups are short anyway, and cost less where they are wide.
bool AreUnitsFew(const ExpertGemmArgs& args) {
  constexpr int kManyGroups = 16, kRoundsMin = 3;
  const int out_tiles = args.up != nullptr ? RingFew::kOutTiles<true> : RingFew::kOutTiles<false>;
  return Int4Groups(args.cols) > kManyGroups &&
         int64_t{args.num_tiles} * (args.rows / (out_tiles * kInt4TileRows)) <
             int64_t{kRoundsMin} * NumProcessors() * RingFew::kBlocks;
}

}  // namespace

bool RingIsBuilt() {
  constexpr int kArchitectures[] = {__CUDA_ARCH_LIST__};
  return *std::max_element(std::begin(kArchitectures), std::end(kArchitectures)) >= 900;
}

cudaError_t LaunchExpertGemmRing(cudaStream_t stream, int tile_slots, const ExpertGemmArgs& args) {
  if (args.x_stride % 8 != 0 || !IsAligned16(args.x)) return cudaErrorInvalidValue;
  const bool is_short = Int4Groups(args.cols) < kShortGroups;
  if (tile_slots == kRingSlots) {
    return is_short ? Launch<RingManyShort>(stream, args) : Launch<RingMany>(stream, args);
  }
  if (is_short) return Launch<RingFewShort>(stream, args);
  return AreUnitsFew(args) ? Launch<RingFewNarrow>(stream, args) : Launch<RingFew>(stream, args);
}

}  // namespace writescope::kernels
