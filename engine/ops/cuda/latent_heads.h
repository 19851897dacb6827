// Attention of prompts to latents as keys and values of heads (LatentHeads), on compute capability
// 9.0: the latents of a pass are multiplied by the heads' matrices, a part after the other, and
// what comes out becomes the operands of the warpgroup kernel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "absl/functional/function_ref.h"
#include "engine/base/units.h"
#include "engine/device/cuda/cuda_device.h"
#include "engine/kernels/cuda/attend_launch.h"
#include "engine/kernels/cuda/attend_work.h"
#include "engine/ops/cuda/attend_plan.h"
#include "engine/ops/ops.h"

namespace writescope::ops {

// Latents whose keys and values of heads are wanted; all bf16, as CudaAttend::AttendHeads has them.
struct LatentPart {
  int num_tokens = 0;
  const std::byte* latents = nullptr;  // Device [num_tokens, latent]
  std::byte* keys = nullptr;           // Device [num_tokens, num_heads, nope]
  std::byte* values = nullptr;         // Device [num_heads, v_head_dim, num_tokens]
};
// Submits the products.
using LatentProducts = std::function<void(const LatentPart& part)>;

// Latents that it is for: 512 values, and 64 for the rope part of keys.
inline constexpr int kLatentKeyDim = 576;
// Of device memory: 17K tokens of 16 heads as operands, and what their products need.
inline constexpr int64_t kLatentScratchBytes = 160 * kMiB;

// Engine thread.
class LatentHeadsAttention {
 public:
  // Where the kernels of a call find its arrays: in `inlined`, which gives null, or on the device.
  using Place =
      absl::FunctionRef<const std::byte*(std::span<const std::byte> arrays, std::byte* inlined)>;
  // `max_shared_bytes` is what a thread block can have; 0 where there are no warpgroup products.
  // The scratch is free between calls.
  LatentHeadsAttention(device::CudaQueue& compute, int max_shared_bytes, std::byte* scratch,
                       int64_t scratch_bytes)
      : compute_(compute),
        max_shared_bytes_(max_shared_bytes),
        scratch_(scratch),
        scratch_bytes_(scratch_bytes) {}

  bool Takes(const KvGeometry& kv, const LatentHeads& heads) const;
  // CudaAttend::AttendHeads; `rows` are those of the call.
  void Attend(const AttendArgs& args, kernels::AttendRows rows, int64_t max_array_bytes,
              const LatentProducts& products, Place place);
  void WarmUp(const KvGeometry& kv, const LatentHeads& heads, const LatentProducts& products);

 private:
  // The scratch: a part of the latents, then the operands of a pass.
  struct Layout {
    int part_blocks = 0;
    LatentPart part;
    std::byte* operands = nullptr;
    int64_t max_blocks = 0;  // Of a pass
  };
  Layout LayoutFor(const LatentHeads& heads) const;
  void MakeOperands(const kernels::TileCall& call, const KvGeometry& kv, const Layout& layout,
                    const LatentProducts& products);
  void Prepare(const kernels::TileKernel& kernel);

  device::CudaQueue& compute_;
  const int max_shared_bytes_;
  std::byte* const scratch_;
  const int64_t scratch_bytes_;
  bool is_prepared_ = false;
  TilePlanner tiles_;
};

}  // namespace writescope::ops
