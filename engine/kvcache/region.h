// One region of the KV cache: memory of one kind, made once at start-up, and who has which block of
// it.
#pragma once

#include <cstdint>
#include <map>
#include <string_view>

#include "absl/status/statusor.h"
#include "engine/base/tile_layout.h"
#include "engine/device/device.h"

namespace writescope::kvcache {

// Two dimensions: which processor computes on a byte (device and stream: the GPU; host: the CPU;
// swing: either), and whether it is read where it lies or crosses the link first.
enum class RegionKind {
  kDevice,  // VRAM
  kStream,  // Page-locked host memory that only the copy engine reads
  kSwing,   // Page-locked and cacheable: either side may take any block in any step
  kHost,    // Cacheable host memory that only the CPU reads in decode; may be unpinned
};
inline constexpr int kNumRegions = 4;
inline constexpr RegionKind kAllRegions[kNumRegions] = {RegionKind::kDevice, RegionKind::kStream,
                                                        RegionKind::kSwing, RegionKind::kHost};
std::string_view RegionName(RegionKind kind);
constexpr bool IsSpilled(RegionKind kind) { return kind != RegionKind::kDevice; }

// Block i of every layer belongs together: 64 tokens of all layers are placed as one.
//   memory: [num_layers] planes of [num_blocks] blocks
// Engine thread; Address is thread-safe.
class Region {
 public:
  // Takes the memory from `device`; a region of 0 blocks takes none.
  static absl::StatusOr<Region> Create(RegionKind kind, const KvGeometry& geometry, int num_layers,
                                       int num_blocks, device::Device& device);

  RegionKind kind() const { return kind_; }
  int num_blocks() const { return num_blocks_; }
  int free_blocks() const { return free_blocks_; }
  int64_t block_bytes() const { return block_bytes_; }
  // From one layer's plane to the next.
  int64_t plane_bytes() const { return block_bytes_ * num_blocks_; }
  int num_layers() const { return num_layers_; }
  std::byte* Address(int layer, int index) const {
    return memory_.data() + layer * plane_bytes() + index * block_bytes_;
  }
  std::span<std::byte> memory() const { return memory_.bytes(); }

  // A free block: the one after `previous` if it can be had, so that a sequence lies in long runs;
  // else one with much free room behind it. `previous` is -1 without any. -1 when all are taken.
  int Allocate(int previous);
  void Free(int index);

 private:
  Region(RegionKind kind, int64_t block_bytes, int num_layers, int num_blocks,
         device::Buffer memory);
  void Take(std::map<int, int>::iterator extent, int index);

  RegionKind kind_;
  int64_t block_bytes_;
  int num_layers_;
  int num_blocks_;
  int free_blocks_;
  device::Buffer memory_;
  std::map<int, int> free_extents_;  // First block -> number of blocks; never adjacent.
};

}  // namespace writescope::kvcache
