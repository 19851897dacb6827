#include "engine/kvcache/inplace_kv_cache.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/base/check.h"
#include "engine/base/status_macros.h"
#include "engine/base/units.h"

namespace writescope::kvcache {
namespace {

constexpr int kTailHalves = 2;

}  // namespace

int64_t InplaceKvCache::TailBytes(const Options& options) {
  return options.geometry.block_bytes() * options.num_layers * kTailHalves * options.max_sequences;
}

int64_t InplaceKvCache::WorkspaceBytes(const Options& options) {
  return options.geometry.block_bytes() * 2 * std::max(options.workspace_units, 1);
}

absl::StatusOr<std::unique_ptr<InplaceKvCache>> InplaceKvCache::Create(const Options& options,
                                                                       device::Device& device) {
  ASSIGN_OR_RETURN(device::Buffer tails, device.AllocateDevice(TailBytes(options), "open tails"));
  ASSIGN_OR_RETURN(device::Buffer workspace,
                   device.AllocateDevice(WorkspaceBytes(options), "prefill workspace"));
  ASSIGN_OR_RETURN(BlockTable blocks, BlockTable::Create({.geometry = options.geometry,
                                                          .num_layers = options.num_layers,
                                                          .blocks = options.blocks,
                                                          .verify = options.verify},
                                                         device));
  return std::unique_ptr<InplaceKvCache>(new InplaceKvCache(
      options, device, std::move(blocks), std::move(tails), std::move(workspace)));
}

InplaceKvCache::InplaceKvCache(const Options& options, device::Device& device, BlockTable blocks,
                               device::Buffer tails, device::Buffer workspace)
    : options_(options),
      device_(device),
      blocks_(std::move(blocks)),
      tails_(std::move(tails)),
      workspace_(std::move(workspace)),
      sequences_(static_cast<size_t>(options.max_sequences)) {}

InplaceKvCache::~InplaceKvCache() {
  device::AwaitIdle({&device_.compute(), &device_.upload(), &device_.download()}, "KV cache");
}

int64_t InplaceKvCache::bytes_per_token() const {
  return options_.geometry.block_bytes() * options_.num_layers / kBlockTokens;
}

int64_t InplaceKvCache::FreeBlocks() const {
  int64_t blocks = 0;
  for (const int64_t available : blocks_.Fill().available) blocks += available;
  return blocks;
}

int64_t InplaceKvCache::HeldPrefixBlocks(std::span<const TokenId> tokens,
                                         int64_t max_tokens) const {
  if (!options_.prefix_cache) return 0;
  int64_t held = 0;
  PrefixIndex::EntryId entry = PrefixIndex::kRoot;
  const int64_t limit = std::min<int64_t>(max_tokens, static_cast<int64_t>(tokens.size()));
  for (int64_t position = 0; position + kBlockTokens <= limit; position += kBlockTokens) {
    const PrefixIndex::Found found =
        blocks_.FindPrefix(entry, tokens.subspan(static_cast<size_t>(position), kBlockTokens));
    if (found.entry == PrefixIndex::kNone) break;
    entry = found.entry;
    if (blocks_.holders(found.block_id) > 0) ++held;
  }
  return held;
}

int64_t InplaceKvCache::UnpromisedBlocks() const {
  int64_t blocks = FreeBlocks();
  for (const Sequence& s : sequences_) {
    if (!s.in_use) continue;
    blocks -= std::max<int64_t>(0, s.expected_blocks - static_cast<int64_t>(s.block_ids.size()));
  }
  return blocks;
}

LayeredAddress InplaceKvCache::TailAddress(int slot, int half) const {
  const int64_t block_bytes = options_.geometry.block_bytes();
  const int64_t index = slot * kTailHalves + half;
  return {tails_.data() + index * options_.num_layers * block_bytes, block_bytes,
          options_.num_layers};
}

LayeredAddress InplaceKvCache::WorkspaceAddress(int index) const {
  const int64_t block_bytes = options_.geometry.block_bytes();
  return {workspace_.data() + index * block_bytes, options_.workspace_units * block_bytes, 2};
}

LayeredAddress InplaceKvCache::HomeAddress(int block_id) const {
  const BlockPlace home = blocks_.home(block_id);
  const Region& region = blocks_.region(home.region);
  return {region.Address(0, home.index), region.plane_bytes(), options_.num_layers};
}

int InplaceKvCache::AddSequence(int64_t expected_blocks) {
  for (size_t slot = 0; slot < sequences_.size(); ++slot) {
    Sequence& s = sequences_[slot];
    if (s.in_use) continue;
    s = Sequence();
    s.in_use = true;
    s.expected_blocks = expected_blocks;
    s.device_quota = DeviceQuotaFor(expected_blocks, blocks_.Fill());
    return static_cast<int>(slot);
  }
  return -1;
}

int64_t InplaceKvCache::MatchPrefix(int slot, std::span<const TokenId> tokens, int64_t max_tokens) {
  Sequence& s = sequence(slot);
  CHECK_EQ(s.length, 0);
  if (!options_.prefix_cache) return 0;
  const int64_t limit = std::min<int64_t>(max_tokens, static_cast<int64_t>(tokens.size()));
  while (s.length + kBlockTokens <= limit) {
    const auto unit = tokens.subspan(static_cast<size_t>(s.length), kBlockTokens);
    const PrefixIndex::Found found = blocks_.FindPrefix(s.last_entry, unit);
    if (found.entry == PrefixIndex::kNone) break;
    blocks_.Hold(found.block_id);
    if (blocks_.home(found.block_id).region == RegionKind::kDevice) ++s.device_blocks;
    s.block_ids.push_back(found.block_id);
    s.tokens.insert(s.tokens.end(), unit.begin(), unit.end());
    s.last_entry = found.entry;
    s.length += kBlockTokens;
    ++s.indexed_units;
  }
  return s.length;
}

int64_t InplaceKvCache::DeviceTokens(int slot) const {
  int64_t tokens = 0;
  for (const int id : sequence(slot).block_ids) {
    if (blocks_.home(id).region == RegionKind::kDevice) tokens += kBlockTokens;
  }
  return tokens;
}

SequencePlacement InplaceKvCache::Placement(int slot) const {
  const Sequence& s = sequence(slot);
  SequencePlacement placement;
  const int64_t unit_bytes = options_.geometry.block_bytes() * options_.num_layers;
  for (const int id : s.block_ids) {
    placement.bytes[static_cast<size_t>(blocks_.home(id).region)] += unit_bytes;
  }
  const int64_t open_tokens = s.length - static_cast<int64_t>(s.block_ids.size()) * kBlockTokens;
  placement.bytes[static_cast<size_t>(RegionKind::kDevice)] += open_tokens * bytes_per_token();
  return placement;
}

void InplaceKvCache::RemoveSequence(int slot) {
  Sequence& s = sequence(slot);
  CHECK(s.in_use) << "slot " << slot;
  if (absl::Status status = AwaitCommits(slot); !status.ok()) {
    // The copy may still land, in a block that would have a new owner by then.
    CHECK(false) << "a commit did not end: " << status.ToString();
  }
  // Deepest first, so that eviction takes a prefix from its end.
  for (auto id = s.block_ids.rbegin(); id != s.block_ids.rend(); ++id) blocks_.Release(*id);
  s = Sequence();
}

int InplaceKvCache::AllocateBlock(Sequence& s) {
  const int previous = s.block_ids.empty() ? -1 : s.block_ids.back();
  const int id = blocks_.Allocate({.device_blocks = s.device_blocks,
                                   .device_quota = s.device_quota,
                                   .host_after_spilled_blocks = options_.host_after_spilled_blocks},
                                  previous);
  if (id < 0) return -1;
  if (blocks_.home(id).region == RegionKind::kDevice) ++s.device_blocks;
  s.block_ids.push_back(id);
  return id;
}

void InplaceKvCache::UndoBlocks(Sequence& s, const WritePlan& plan) {
  for (auto unit = plan.units.rbegin(); unit != plan.units.rend(); ++unit) {
    if (unit->block_id < 0) continue;
    CHECK_EQ(s.block_ids.back(), unit->block_id);
    if (blocks_.home(unit->block_id).region == RegionKind::kDevice) --s.device_blocks;
    s.block_ids.pop_back();
    blocks_.Release(unit->block_id);
  }
}

absl::Status InplaceKvCache::ClearTailHalf(int slot, int half) {
  Sequence& s = sequence(slot);
  for (const PendingCommit& commit : s.pending) {
    if (commit.tail_half == half) {
      RETURN_IF_ERROR(AwaitCommits(slot));
      break;
    }
  }
  if (s.half_dirty[half]) {
    device_.compute().Zero(TailAddress(slot, half).base,
                           options_.geometry.block_bytes() * options_.num_layers);
    s.half_dirty[half] = false;
  }
  return absl::OkStatus();
}

void InplaceKvCache::ZeroTailFrom(int slot, int half, int first_slot, int num_layers) {
  const KvGeometry& kv = options_.geometry;
  const int word_values = KvWordValues(kv.dtype);
  const int64_t value_bytes = KvDtypeBytes(kv.dtype);
  const int64_t word_bytes = word_values * value_bytes;
  device::Queue& queue = device_.compute();
  // Zeroes a plane from `at` in rows up to where whole ones begin, then those.
  const auto zero = [&](std::byte* plane, int64_t plane_bytes, int64_t at, int64_t row_bytes,
                        int64_t stride_bytes, int64_t num_rows, int64_t whole_from) {
    if (whole_from > at) queue.ZeroRows(plane + at, row_bytes, stride_bytes, num_rows);
    if (whole_from < plane_bytes) queue.Zero(plane + whole_from, plane_bytes - whole_from);
  };
  const int tile = static_cast<int>(CeilDiv(first_slot, kTileTokens));
  const int group = static_cast<int>(CeilDiv(first_slot, word_values));
  for (int layer = 0; layer < num_layers; ++layer) {
    for (int head = 0; head < kv.num_kv_heads; ++head) {
      std::byte* k_plane = TailAddress(slot, half).At(layer) + head * kv.head_bytes();
      zero(k_plane, kv.k_plane_bytes(), KIndex(first_slot, 0, kv.k_dim, word_values) * value_bytes,
           (tile * kTileTokens - first_slot) * word_bytes, kTileTokens * word_bytes,
           kv.k_dim / word_values,
           KIndex(tile * kTileTokens, 0, kv.k_dim, word_values) * value_bytes);
      if (kv.value_in_key) continue;
      zero(k_plane + kv.k_plane_bytes(), kv.v_plane_bytes(),
           VIndex(first_slot, 0, kv.v_dim, word_values) * value_bytes,
           (group * word_values - first_slot) * value_bytes, word_bytes, kv.v_dim,
           VIndex(group * word_values, 0, kv.v_dim, word_values) * value_bytes);
    }
  }
}

absl::StatusOr<UnitWrite> InplaceKvCache::PlanUnit(int slot, int64_t position, int64_t end,
                                                   WritePlan* plan, int* workspace_used) {
  UnitWrite write;
  write.unit = position / kBlockTokens;
  write.first_slot = static_cast<int>(position % kBlockTokens);
  write.num_slots =
      static_cast<int>(std::min<int64_t>(kBlockTokens - write.first_slot, end - position));
  const bool full = write.first_slot + write.num_slots == kBlockTokens;
  const bool whole = full && write.first_slot == 0;
  if (!whole && write.first_slot == 0) {
    // The unit that was open may become full in this very step, so the new one takes the other
    // half.
    RETURN_IF_ERROR(ClearTailHalf(slot, 1 - plan->open_half));
    plan->open_half = 1 - plan->open_half;
  }
  if (full) {
    write.block_id = AllocateBlock(sequence(slot));
    if (write.block_id < 0) {
      return absl::ResourceExhaustedError(
          absl::StrCat("no free KV block for position ", position, " of a sequence"));
    }
  }
  if (!whole) {
    write.tail_half = plan->open_half;
    write.target = TailAddress(slot, write.tail_half);
  } else if (blocks_.home(write.block_id).region == RegionKind::kDevice) {
    write.target = HomeAddress(write.block_id);
    write.in_home = true;
  } else {
    CHECK_LT(*workspace_used, options_.workspace_units) << "a step of more tokens than planned for";
    write.target = WorkspaceAddress((*workspace_used)++);
  }
  return write;
}

absl::StatusOr<WritePlan> InplaceKvCache::PrepareWrite(int slot, int num_tokens,
                                                       int* workspace_used) {
  Sequence& s = sequence(slot);
  CHECK(s.in_use && num_tokens > 0) << "slot " << slot << ", " << num_tokens << " tokens";
  // What went around the tail is readable only at home, so it has to be there.
  for (const PendingCommit& commit : s.pending) {
    if (commit.tail_half >= 0) continue;
    RETURN_IF_ERROR(AwaitCommits(slot));
    break;
  }
  WritePlan plan{.slot = slot,
                 .first_position = s.length,
                 .num_tokens = num_tokens,
                 .units = {},
                 .open_half = s.open_half};
  s.layers_written = 0;
  const int workspace_before = *workspace_used;
  const int64_t end = s.length + num_tokens;
  for (int64_t position = s.length; position < end;) {
    absl::StatusOr<UnitWrite> write = PlanUnit(slot, position, end, &plan, workspace_used);
    if (!write.ok()) {
      UndoBlocks(s, plan);
      *workspace_used = workspace_before;
      return std::move(write).status();
    }
    plan.units.push_back(*write);
    position += write->num_slots;
  }
  return plan;
}

void InplaceKvCache::AwaitWorkspace(int layer) {
  device_.compute().WaitFor(workspace_free_[layer % 2]);
}

void InplaceKvCache::CopyToHome(int block_id, int layer, const std::byte* from) {
  const BlockPlace home = blocks_.home(block_id);
  std::byte* to = blocks_.region(home.region).Address(layer, home.index);
  device::Queue& queue =
      home.region == RegionKind::kDevice ? device_.compute() : device_.download();
  queue.Copy(to, from, options_.geometry.block_bytes());
  blocks_.CountWrite(block_id, layer);
  committed_bytes_ += options_.geometry.block_bytes();
}

void InplaceKvCache::CommitLayer(const WritePlan& plan, int layer) {
  sequence(plan.slot).layers_written = layer + 1;
  bool waited = false;
  for (const UnitWrite& write : plan.units) {
    if (write.block_id < 0) continue;
    if (write.in_home) {
      blocks_.CountWrite(write.block_id, layer);
    } else if (write.tail_half < 0) {
      if (!waited) device_.download().WaitFor(device_.compute().Record());
      waited = true;
      CopyToHome(write.block_id, layer, write.target.At(layer));
    }
  }
  if (waited) workspace_free_[layer % 2] = device_.download().Record();
}

void InplaceKvCache::FinishWrite(const WritePlan& plan, std::span<const TokenId> tokens) {
  Sequence& s = sequence(plan.slot);
  CHECK_EQ(tokens.size(), static_cast<size_t>(plan.num_tokens));
  s.tokens.insert(s.tokens.end(), tokens.begin(), tokens.end());
  s.length += plan.num_tokens;
  s.open_half = plan.open_half;
  for (const UnitWrite& write : plan.units) {
    if (write.block_id < 0) continue;
    const bool to_device = blocks_.home(write.block_id).region == RegionKind::kDevice;
    if (write.tail_half >= 0) {
      if (!to_device) device_.download().WaitFor(device_.compute().Record());
      for (int layer = 0; layer < options_.num_layers; ++layer) {
        CopyToHome(write.block_id, layer, write.target.At(layer));
      }
      s.half_dirty[write.tail_half] = true;
    }
    s.pending.push_back({write.unit, write.block_id, write.tail_half,
                         to_device ? device_.compute().Record() : device_.download().Record()});
  }
}

void InplaceKvCache::AbandonWrite(const WritePlan& plan) {
  Sequence& s = sequence(plan.slot);
  // Copies that were submitted still run; their blocks must not be given away before.
  for (device::Queue* queue : {&device_.compute(), &device_.download()}) {
    if (absl::Status status = queue->Record().Wait(options_.wait_limit * 15); !status.ok()) {
      CHECK(false) << "a failed step does not end: " << status.ToString();
    }
  }
  UndoBlocks(s, plan);
  for (const UnitWrite& write : plan.units) {
    if (write.tail_half < 0) continue;
    if (write.first_slot == 0) {
      // A unit that this step began holds nothing of value.
      s.half_dirty[write.tail_half] = true;
    } else {
      ZeroTailFrom(plan.slot, write.tail_half, write.first_slot, s.layers_written);
    }
  }
  s.layers_written = 0;
}

void InplaceKvCache::NoteCommits(int slot) {
  Sequence& s = sequence(slot);
  auto first_open = s.pending.begin();
  for (; first_open != s.pending.end() && first_open->landed.Done(); ++first_open) {
    blocks_.Seal(first_open->block_id);
  }
  s.pending.erase(s.pending.begin(), first_open);
  IndexSealed(s);
}

absl::Status InplaceKvCache::AwaitCommits(int slot) {
  for (const PendingCommit& commit : sequence(slot).pending) {
    RETURN_IF_ERROR(commit.landed.Wait(options_.wait_limit * 15));
  }
  NoteCommits(slot);
  return absl::OkStatus();
}

void InplaceKvCache::IndexSealed(Sequence& s) {
  if (!options_.prefix_cache) return;
  while (s.indexed_units < static_cast<int64_t>(s.block_ids.size())) {
    const int id = s.block_ids[static_cast<size_t>(s.indexed_units)];
    if (!blocks_.sealed(id)) return;
    const auto unit = std::span<const TokenId>(s.tokens).subspan(
        static_cast<size_t>(s.indexed_units * kBlockTokens), kBlockTokens);
    s.last_entry = blocks_.Index(id, s.last_entry, unit);
    ++s.indexed_units;
  }
}

SequenceView InplaceKvCache::View(int slot, const WritePlan& plan) const {
  const Sequence& s = sequence(slot);
  SequenceView view;
  size_t sealed = 0;
  while (sealed < s.block_ids.size() && blocks_.sealed(s.block_ids[sealed])) ++sealed;
  view.block_ids = std::span<const int>(s.block_ids).first(sealed);
  // Full units whose commit is under way are read from the tail; PrepareWrite has seen to the
  // others.
  for (const PendingCommit& commit : s.pending) {
    CHECK_GE(commit.tail_half, 0) << "unit " << commit.unit;
    view.open.push_back(
        {TailAddress(slot, commit.tail_half), commit.unit * kBlockTokens, kBlockTokens});
  }
  const int64_t written_end = plan.first_position + plan.num_tokens;
  for (const UnitWrite& write : plan.units) {
    const int64_t first = write.unit * kBlockTokens;
    view.open.push_back({write.target, first,
                         static_cast<int>(std::min<int64_t>(kBlockTokens, written_end - first))});
  }
  return view;
}

}  // namespace writescope::kvcache
