#include "engine/ops/cuda/cuda_attend.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "engine/base/check.h"
#include "engine/base/status_macros.h"
#include "engine/base/units.h"
#include "engine/kernels/cuda/attend_launch.h"
#include "engine/ops/cuda/attend_plan.h"
#include "engine/ops/cuda/latent_heads.h"

namespace writescope::ops {
namespace {

using kernels::SliceCall;
using kernels::SliceSizes;
using kernels::TileCall;
using kernels::TileSizes;

// Slices for which there is room if each holds one row: enough for every chunk that runs at once
// and some hundreds of borders between sequences. What is more takes another pass.
constexpr int64_t kSlicesMin = 1024;
constexpr int64_t kArrayBytes = device::kMaxArgumentBytes;

// Floats of a partial beside its values.
constexpr int64_t kStateFloats = 2;

// Of kernels that re-lay keys and values, which are for heads of so many. A pass with more blocks
// than there is room for begins anew with the states of the one before: 32K tokens of four KV heads
// at once make that 1 % of a prompt's attention. Slices and tiles of a call are not at work at the
// same time, so the room is the partials'.
constexpr int64_t kScratchBytes = 64 * kMiB;
constexpr int kScratchHeadDim = 128;

int64_t PartialBytes(const OpsLimits& limits) {
  const int64_t partials = kSlicesMin * limits.num_heads *
                           (PadDim(limits.max_head_dim) + kStateFloats) * int64_t{sizeof(float)};
  if (limits.max_head_dim == kScratchHeadDim) return std::max(partials, kScratchBytes);
  if (limits.max_head_dim == kLatentKeyDim) return std::max(partials, kLatentScratchBytes);
  return partials;
}

// A reader with more (row, head of a group) pairs than this is taken in tiles: each block of keys
// is then read once for 128 of them.
constexpr int kSlicedPairsMax = 64;

class CudaAttendImpl : public CudaAttend {
 public:
  // `max_shared_bytes` is what a thread block can have.
  CudaAttendImpl(device::CudaDevice& device, ComputeType compute, bool force_simt,
                 int max_shared_bytes, device::Buffer workspace)
      : compute_(device.compute()),
        num_processors_(device.info().num_multiprocessors),
        with_tensor_cores_(!force_simt && device.info().compute_major >= 8),
        with_warpgroups_(with_tensor_cores_ && device.info().compute_major == 9 &&
                         device.info().compute_minor == 0),
        max_shared_bytes_(max_shared_bytes),
        out_bf16_(compute == ComputeType::kBf16),
        workspace_(std::move(workspace)),
        heads_(compute_, with_warpgroups_ ? max_shared_bytes : 0, scratch(), scratch_bytes()) {}

  void Reset(int num_rows, int num_heads, const AttendState& state) override {
    compute_.Check(kernels::LaunchResetStates(compute_.stream(), int64_t{num_rows} * num_heads,
                                              state.m, state.l),
                   "reset of attention");
  }

  void Attend(const AttendArgs& args) override;
  bool TakesHeads(const KvGeometry& kv, const LatentHeads& heads) const override {
    return heads_.Takes(kv, heads);
  }
  void AttendHeads(const AttendArgs& args, const LatentProducts& products) override;
  void Merge(const MergeArgs& args) override;
  std::optional<StagedPlan> Stage(const AttendArgs& args, int64_t max_bytes) override;
  void AttendStaged(const StagedAttend& args) override;
  void WarmUp(const KvGeometry& geometry, int num_heads) override;
  void WarmUpHeads(const KvGeometry& kv, const LatentHeads& heads,
                   const LatentProducts& products) override {
    heads_.WarmUp(kv, heads, products);
  }

 private:
  std::byte* scratch() const { return workspace_.data() + kArrayBytes; }
  int64_t scratch_bytes() const { return workspace_.size_bytes() - kArrayBytes; }
  // The kernels for such a cache; the second has no launch where rows are always sliced.
  kernels::SliceKernel SliceKernelFor(const KvGeometry& kv);
  kernels::TileKernel TileKernelFor(const KvGeometry& kv);
  void Prepare(cudaError_t (*prepare)(), cudaError_t (**prepared)());
  void AttendSliced(const AttendArgs& args, const ReaderFilter& filter);
  void AttendTiled(const AttendArgs& args, const ReaderFilter& filter);
  // Blocks of a pass.
  int64_t MaxBlocks(const kernels::TileKernel& kernel) const;
  SliceLimits LimitsFor(const KvGeometry& kv, const kernels::SliceKernel& kernel) const;
  // `partials` says for how many there is to be room.
  SliceCall MakeSliceCall(const kernels::AttendRows& rows, const SliceSizes& sizes,
                          int64_t partials) const;
  // Where the kernels find `arrays`: in `inlined`, which gives null, or in device memory.
  const std::byte* Place(std::span<const std::byte> arrays, std::byte* inlined);

  device::CudaQueue& compute_;
  const int num_processors_;
  const bool with_tensor_cores_;
  const bool with_warpgroups_;
  const int max_shared_bytes_;
  const bool out_bf16_;
  const device::Buffer workspace_;  // Arrays of calls, partials or scratch
  cudaError_t (*prepared_slices_)() = nullptr;
  cudaError_t (*prepared_tiles_)() = nullptr;
  SlicePlanner slices_;
  TilePlanner tiles_;
  LatentHeadsAttention heads_;
};

kernels::AttendRows RowsOf(const AttendArgs& args) {
  return {.kv = args.kv,
          .num_heads = args.num_heads,
          .q = args.q,
          .o = args.state.o,
          .m = args.state.m,
          .l = args.state.l};
}

void CheckGeometry(const KvGeometry& kv, int num_heads) {
  CHECK(kv.num_kv_heads > 0 && num_heads % kv.num_kv_heads == 0)
      << num_heads << " heads on " << kv.num_kv_heads << " KV heads";
  CHECK(kv.k_dim % kDimMultiple == 0 && kv.v_dim % kDimMultiple == 0);
  CHECK(kv.k_dim <= kernels::kSimtMaxDim && kv.v_dim <= kernels::kSimtMaxDim)
      << "heads of " << kv.k_dim << " and " << kv.v_dim;
  CHECK(!kv.value_in_key || kv.v_dim <= kv.k_dim);
}

void CheckAttend(const AttendArgs& args) {
  CheckGeometry(args.kv, args.num_heads);
  for (const AttendSpan& span : args.spans) {
    CHECK(span.num_tokens >= 0 && span.num_tokens <= int64_t{span.num_blocks} * kBlockTokens &&
          span.num_tokens > int64_t{span.num_blocks - 1} * kBlockTokens)
        << span.num_tokens << " tokens in " << span.num_blocks << " blocks";
    CHECK(span.num_tokens <= std::numeric_limits<int32_t>::max());
    CHECK(span.first_reader >= 0 && span.num_readers >= 0 &&
          span.first_reader + span.num_readers <= static_cast<int>(args.readers.size()));
  }
  for (const int reader : args.readers) {
    CHECK(reader >= 0 && reader < static_cast<int>(args.rows.size())) << "reader " << reader;
  }
}

const std::byte* CudaAttendImpl::Place(std::span<const std::byte> arrays, std::byte* inlined) {
  if (arrays.size() <= kernels::kInlineBytes) {
    std::memcpy(inlined, arrays.data(), arrays.size());
    return nullptr;
  }
  std::byte* staged = compute_.StageArguments(static_cast<int64_t>(arrays.size()));
  std::memcpy(staged, arrays.data(), arrays.size());
  compute_.Check(kernels::LaunchStageArrays(compute_.stream(), staged, workspace_.data(),
                                            static_cast<int64_t>(arrays.size())),
                 "arrays of attention");
  return workspace_.data();
}

SliceCall CudaAttendImpl::MakeSliceCall(const kernels::AttendRows& rows, const SliceSizes& sizes,
                                        int64_t partials) const {
  SliceCall call;
  call.rows = rows;
  call.sizes = sizes;
  call.staged = nullptr;
  call.layer = 0;
  call.arrays = nullptr;
  call.partials.o = reinterpret_cast<float*>(scratch());
  call.partials.m = call.partials.o + partials * rows.kv.v_dim;
  call.partials.l = call.partials.m + partials;
  return call;
}

void CudaAttendImpl::Prepare(cudaError_t (*prepare)(), cudaError_t (**prepared)()) {
  if (prepare == nullptr || prepare == *prepared) return;
  compute_.Check(prepare(), "shared memory of attention");
  *prepared = prepare;
}

kernels::SliceKernel CudaAttendImpl::SliceKernelFor(const KvGeometry& kv) {
  kernels::SliceKernel kernel;
  if (with_tensor_cores_) kernel = kernels::DecodeKernel(kv);
  if (kernel.launch == nullptr || kernel.shared_bytes > max_shared_bytes_) {
    kernel = kernels::SimtKernel();
  }
  Prepare(kernel.prepare, &prepared_slices_);
  return kernel;
}

kernels::TileKernel CudaAttendImpl::TileKernelFor(const KvGeometry& kv) {
  kernels::TileKernel kernel;
  if (with_warpgroups_) kernel = kernels::WarpgroupPrefillKernel(kv);
  const bool takes_it = kernel.launch != nullptr && MaxBlocks(kernel) > 0;
  if (with_tensor_cores_ && !takes_it) kernel = kernels::PrefillKernel(kv);
  if (kernel.launch == nullptr || kernel.shared_bytes > max_shared_bytes_) return {};
  Prepare(kernel.prepare, &prepared_tiles_);
  return kernel;
}

int64_t CudaAttendImpl::MaxBlocks(const kernels::TileKernel& kernel) const {
  if (kernel.scratch_block_bytes == 0) return std::numeric_limits<int32_t>::max();
  return scratch_bytes() / kernel.scratch_block_bytes;
}

SliceLimits CudaAttendImpl::LimitsFor(const KvGeometry& kv,
                                      const kernels::SliceKernel& kernel) const {
  const int64_t floats = scratch_bytes() / int64_t{sizeof(float)};
  return {.max_partials = floats / (kv.v_dim + kStateFloats),
          .max_array_bytes = kArrayBytes,
          .max_thread_blocks = num_processors_ * kernel.blocks_per_processor,
          .min_chunk_blocks = kernel.min_chunk_blocks};
}

void CudaAttendImpl::AttendSliced(const AttendArgs& args, const ReaderFilter& filter) {
  const kernels::SliceKernel kernel = SliceKernelFor(args.kv);
  const kernels::AttendRows rows = RowsOf(args);
  slices_.Plan(
      args, filter, LimitsFor(args.kv, kernel),
      [&](const SliceSizes& sizes, std::span<const std::byte> arrays) {
        const int64_t partials = int64_t{NumSlices(sizes)} * rows.kv.num_kv_heads * sizes.num_slots;
        SliceCall call = MakeSliceCall(rows, sizes, partials);
        call.arrays = Place(arrays, call.inlined);
        compute_.Check(kernel.launch(compute_.stream(), call), "attention over slices");
        compute_.Check(kernels::LaunchFoldPartials(compute_.stream(), call), "fold of partials");
      });
}

void CudaAttendImpl::AttendTiled(const AttendArgs& args, const ReaderFilter& filter) {
  const kernels::TileKernel kernel = TileKernelFor(args.kv);
  const kernels::AttendRows rows = RowsOf(args);
  tiles_.Plan(args, filter,
              {.tile_rows = kernel.tile_rows,
               .max_array_bytes = kArrayBytes,
               .max_blocks = MaxBlocks(kernel),
               .group = args.num_heads / args.kv.num_kv_heads},
              [&](const TileSizes& sizes, std::span<const std::byte> arrays) {
                TileCall call;
                call.rows = rows;
                call.sizes = sizes;
                call.scratch = scratch();
                call.arrays = Place(arrays, call.inlined);
                compute_.Check(kernel.launch(compute_.stream(), call), "attention over tiles");
              });
}

void CudaAttendImpl::Attend(const AttendArgs& args) {
  CheckAttend(args);
  const bool with_tiles = TileKernelFor(args.kv).launch != nullptr;
  const int group = args.num_heads / args.kv.num_kv_heads;
  constexpr int kAnyRows = std::numeric_limits<int>::max();
  const int max_sliced = with_tiles ? std::max(1, kSlicedPairsMax / group) : kAnyRows;
  AttendSliced(args, {.min_rows = 1, .max_rows = max_sliced});
  if (with_tiles) AttendTiled(args, {.min_rows = max_sliced + 1, .max_rows = kAnyRows});
}

void CudaAttendImpl::AttendHeads(const AttendArgs& args, const LatentProducts& products) {
  CheckAttend(args);
  heads_.Attend(args, RowsOf(args), kArrayBytes, products,
                [this](std::span<const std::byte> arrays, std::byte* inlined) {
                  return Place(arrays, inlined);
                });
}

std::optional<StagedPlan> CudaAttendImpl::Stage(const AttendArgs& args, int64_t max_bytes) {
  CheckAttend(args);
  for (const ReaderRows& rows : args.rows) {
    if (rows.num_rows != 1) return std::nullopt;
  }
  SliceLimits limits = LimitsFor(args.kv, SliceKernelFor(args.kv));
  limits.max_array_bytes = std::min(limits.max_array_bytes, max_bytes);
  const int group = args.num_heads / args.kv.num_kv_heads;
  const int64_t folds =
      CeilDiv(group, kernels::kPanelSlots) * static_cast<int64_t>(args.rows.size());
  StagedPlan plan;
  int passes = 0;
  slices_.Plan(args, {.min_rows = 1, .max_rows = 1}, limits,
               [&](const SliceSizes& sizes, std::span<const std::byte> arrays) {
                 plan = {.sizes = sizes, .arrays = arrays};
                 ++passes;
               });
  if (passes != 1 || plan.sizes.num_folds != folds) return std::nullopt;
  return plan;
}

void CudaAttendImpl::AttendStaged(const StagedAttend& args) {
  CHECK_LE(args.out_dim, args.kv.v_dim);
  const kernels::SliceKernel kernel = SliceKernelFor(args.kv);
  const SliceLimits limits = LimitsFor(args.kv, kernel);
  kernels::AttendRows rows = {};
  rows.kv = args.kv;
  rows.num_heads = args.num_heads;
  rows.q = args.q;
  SliceSizes sizes = {};
  sizes.num_chunks = limits.max_thread_blocks / args.kv.num_kv_heads;
  SliceCall call = MakeSliceCall(rows, sizes, limits.max_partials);
  call.staged = args.plan;
  call.layer = args.layer;
  compute_.Check(kernel.launch(compute_.stream(), call), "attention over staged slices");
  const int group = args.num_heads / args.kv.num_kv_heads;
  compute_.Check(
      kernels::LaunchFinishRows(
          compute_.stream(),
          {.kv = args.kv,
           .num_heads = args.num_heads,
           .staged = args.plan,
           .num_folds = args.num_rows * static_cast<int>(CeilDiv(group, kernels::kPanelSlots)),
           .max_heads = std::min(group, kernels::kPanelSlots),
           .partials = call.partials,
           .out_dim = args.out_dim,
           .out = args.out,
           .out_bf16 = out_bf16_}),
      "end of attention over staged slices");
}

void CudaAttendImpl::Merge(const MergeArgs& args) {
  const LatentHeads* heads = args.state.heads;
  CHECK(heads == nullptr || args.cpu_out == nullptr) << "the CPU attends to latents as they are";
  const int v_dim = heads == nullptr ? args.kv.v_dim : heads->value_dim();
  const int out_dim = heads == nullptr ? args.out_dim : v_dim;
  CHECK_LE(out_dim, v_dim);
  compute_.Check(
      kernels::LaunchMergeStates(compute_.stream(),
                                 {.count = int64_t{args.num_rows} * args.num_heads,
                                  .v_dim = v_dim,
                                  .out_dim = out_dim,
                                  .o = args.state.o,
                                  .m = args.state.m,
                                  .l = args.state.l,
                                  .cpu_out = args.cpu_out,
                                  .cpu_lse = args.cpu_lse,
                                  .failed = compute_.failed_word(),
                                  .behind_wait = args.behind_wait && compute_.waits_by_kernel(),
                                  .out = args.out,
                                  .out_bf16 = out_bf16_}),
      "merge of attention");
}

void CudaAttendImpl::WarmUp(const KvGeometry& geometry, int num_heads) {
  CheckGeometry(geometry, num_heads);
  const cudaStream_t stream = compute_.stream();
  const auto check = [&](cudaError_t error) { compute_.Check(error, "warm-up of attention"); };
  kernels::AttendRows rows = {};
  rows.kv = geometry;
  rows.num_heads = num_heads;
  SliceCall slices = MakeSliceCall(rows, SliceSizes(), 0);
  check(kernels::LaunchStageArrays(stream, nullptr, nullptr, 0));
  check(kernels::LaunchResetStates(stream, 0, nullptr, nullptr));
  check(SliceKernelFor(geometry).launch(stream, slices));
  for (const int fold_slices : {0, std::numeric_limits<int>::max()}) {
    slices.sizes.max_fold_slices = fold_slices;
    check(kernels::LaunchFoldPartials(stream, slices));
  }
  // A plan of zeros, whose only fold has no heads.
  check(cudaMemsetAsync(workspace_.data(), 0, sizeof(SliceSizes) + kernels::kInlineBytes, stream));
  check(kernels::LaunchFinishRows(stream,
                                  {.kv = geometry,
                                   .num_heads = num_heads,
                                   .staged = reinterpret_cast<const SliceSizes*>(workspace_.data()),
                                   .num_folds = 1,
                                   .max_heads = 1,
                                   .partials = slices.partials,
                                   .out_dim = geometry.v_dim,
                                   .out = nullptr,
                                   .out_bf16 = out_bf16_}));
  if (const kernels::TileKernel kernel = TileKernelFor(geometry); kernel.launch != nullptr) {
    TileCall tiles = {};
    tiles.rows = rows;
    check(kernel.launch(stream, tiles));
  }
  kernels::MergeCall merge = {};
  merge.out_bf16 = out_bf16_;
  check(kernels::LaunchMergeStates(stream, merge));
}

}  // namespace

int64_t CudaAttend::WorkspaceBytes(const OpsLimits& limits) {
  return kArrayBytes + PartialBytes(limits);
}

absl::StatusOr<std::unique_ptr<CudaAttend>> CudaAttend::Create(device::CudaDevice& device,
                                                               const OpsLimits& limits,
                                                               ComputeType compute,
                                                               bool force_simt) {
  if (limits.num_heads < 1 || limits.max_head_dim < 1) {
    return absl::InvalidArgumentError(absl::StrCat("attention for ", limits.num_heads, " heads of ",
                                                   limits.max_head_dim, " values"));
  }
  ASSIGN_OR_RETURN(device::Buffer workspace,
                   device.AllocateDevice(WorkspaceBytes(limits), "workspace of attention"));
  int ordinal = 0;
  int max_shared_bytes = 0;
  RETURN_IF_ERROR(device::CudaStatus(cudaGetDevice(&ordinal), "cudaGetDevice"));
  RETURN_IF_ERROR(device::CudaStatus(
      cudaDeviceGetAttribute(&max_shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, ordinal),
      "shared memory of a thread block"));
  return std::unique_ptr<CudaAttend>(
      new CudaAttendImpl(device, compute, force_simt, max_shared_bytes, std::move(workspace)));
}

}  // namespace writescope::ops
