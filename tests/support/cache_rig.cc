#include "tests/support/cache_rig.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/base/bf16.h"
#include "engine/base/check.h"
#include "engine/base/status_macros.h"
#include "engine/base/units.h"
#include "engine/kernels/kv_write.h"

namespace writescope::testing {
namespace {

// One value of a plane as it is stored.
uint32_t StoredBits(const std::byte* plane, int64_t index, KvDtype dtype) {
  uint32_t bits = 0;
  std::memcpy(&bits, plane + index * KvDtypeBytes(dtype), static_cast<size_t>(KvDtypeBytes(dtype)));
  return bits;
}
uint32_t ExpectedBits(float value, KvDtype dtype) {
  return dtype == KvDtype::kBf16 ? FloatToBf16(value) : std::bit_cast<uint32_t>(value);
}

}  // namespace

uint64_t Mix(uint64_t a, uint64_t b) {
  uint64_t x = a * 0x9e3779b97f4a7c15u + b + 0x632be59bd9b4e019u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

double UnitReal(uint64_t hash) { return static_cast<double>(hash >> 11) * 0x1p-53; }

KvSource RandomKv(uint64_t seed) {
  return [seed](int layer, int kv_head, int64_t position, TokenId token, std::span<float> k,
                std::span<float> v) {
    uint64_t at = Mix(Mix(seed, static_cast<uint64_t>(layer)), static_cast<uint64_t>(kv_head));
    at = Mix(Mix(at, static_cast<uint64_t>(position)), static_cast<uint64_t>(token));
    for (float& value : k) value = static_cast<float>(2 * UnitReal(at = Mix(at, 1)) - 1);
    for (float& value : v) value = static_cast<float>(2 * UnitReal(at = Mix(at, 2)) - 1);
  };
}

std::vector<TokenId> RandomTokens(uint64_t seed, int64_t count) {
  std::vector<TokenId> tokens;
  for (int64_t i = 0; i < count; ++i) {
    tokens.push_back(static_cast<TokenId>(Mix(seed, static_cast<uint64_t>(i)) % 50000));
  }
  return tokens;
}

CacheRig::CacheRig(const CacheRigOptions& options, const DeviceWrapper& wrap)
    : options_(options), kv_(RandomKv(1)) {
  auto device = device::CpuDevice::Create({.budget_bytes = kGiB,
                                           .compute_threads = options.device_threads,
                                           .link_bytes_per_s = options.link_bytes_per_s});
  CHECK(device.ok()) << device.status().ToString();
  device_ = wrap ? wrap(*std::move(device)) : *std::move(device);
  auto cache = kvcache::InplaceKvCache::Create(
      {.geometry = options.geometry,
       .num_layers = options.num_layers,
       .max_sequences = options.max_sequences,
       .blocks = options.blocks,
       .workspace_units = options.chunk_tokens / kBlockTokens,
       .prefix_cache = options.prefix_cache,
       .verify = options.verify,
       .host_after_spilled_blocks = options.host_after_spilled_blocks,
       .wait_limit = options.wait_limit},
      *device_);
  CHECK(cache.ok()) << cache.status().ToString();
  cache_ = *std::move(cache);
}

CacheRig::~CacheRig() { device::AwaitIdle({&device_->compute()}, "cache rig"); }

int CacheRig::Add(int64_t expected_blocks) {
  const int slot = cache_->AddSequence(expected_blocks);
  if (slot >= 0) tokens_[slot].clear();
  return slot;
}

int64_t CacheRig::Match(int slot, std::span<const TokenId> tokens, int64_t max_tokens) {
  const int64_t found = cache_->MatchPrefix(slot, tokens, max_tokens);
  tokens_[slot].assign(tokens.begin(), tokens.begin() + found);
  return found;
}

void CacheRig::Remove(int slot) {
  cache_->RemoveSequence(slot);
  tokens_[slot].clear();
}

absl::StatusOr<kvcache::WritePlan> CacheRig::Prepare(int slot, int num_tokens,
                                                     int* workspace_used) {
  cache_->NoteCommits(slot);
  return cache_->PrepareWrite(slot, num_tokens, workspace_used);
}

void CacheRig::WriteLayer(const kvcache::WritePlan& plan, std::span<const TokenId> tokens,
                          int layer) {
  cache_->AwaitWorkspace(layer);
  // The closure keeps what it needs: it runs on the compute queue, as the kernels of a model would.
  device_->compute().Launch(
      [this, plan, layer, tokens = std::vector<TokenId>(tokens.begin(), tokens.end())] {
        const KvGeometry& kv = options_.geometry;
        std::vector<float> k(static_cast<size_t>(kv.k_dim));
        std::vector<float> v(static_cast<size_t>(kv.value_in_key ? 0 : kv.v_dim));
        size_t next = 0;
        for (const kvcache::UnitWrite& write : plan.units) {
          for (int i = 0; i < write.num_slots; ++i) {
            const int slot = write.first_slot + i;
            const int64_t position = write.unit * kBlockTokens + slot;
            for (int head = 0; head < kv.num_kv_heads; ++head) {
              kv_(layer, head, position, tokens[next], k, v);
              std::byte* plane = write.target.At(layer) + head * kv.head_bytes();
              kernels::WriteKey(slot, kv.k_dim, kv.k_dim, kv.dtype, k.data(), plane);
              if (!kv.value_in_key) {
                kernels::WriteValue(slot, kv.v_dim, kv.v_dim, kv.dtype, v.data(),
                                    plane + kv.k_plane_bytes());
              }
            }
            ++next;
          }
        }
        CHECK_EQ(next, tokens.size());
      });
  cache_->CommitLayer(plan, layer);
}

void CacheRig::Finish(const kvcache::WritePlan& plan, std::span<const TokenId> tokens) {
  cache_->FinishWrite(plan, tokens);
  std::vector<TokenId>& known = tokens_[plan.slot];
  known.insert(known.end(), tokens.begin(), tokens.end());
}

absl::Status CacheRig::Append(int slot, std::span<const TokenId> tokens) {
  int workspace_used = 0;
  ASSIGN_OR_RETURN(const kvcache::WritePlan plan,
                   Prepare(slot, static_cast<int>(tokens.size()), &workspace_used));
  for (int layer = 0; layer < options_.num_layers; ++layer) WriteLayer(plan, tokens, layer);
  Finish(plan, tokens);
  return absl::OkStatus();
}

std::string CacheRig::CheckBlock(const std::byte* block, int layer, int64_t first_position,
                                 int num_tokens, int num_written,
                                 std::span<const TokenId> tokens) const {
  const KvGeometry& kv = options_.geometry;
  const int word_values = KvWordValues(kv.dtype);
  std::vector<float> k(static_cast<size_t>(kv.k_dim));
  std::vector<float> v(static_cast<size_t>(kv.value_in_key ? 0 : kv.v_dim));
  for (int head = 0; head < kv.num_kv_heads; ++head) {
    const std::byte* k_plane = block + head * kv.head_bytes();
    const std::byte* v_plane = k_plane + kv.k_plane_bytes();
    for (int slot = 0; slot < kBlockTokens; ++slot) {
      if (slot >= num_written && slot < num_tokens) continue;  // Planned, not written yet
      const int64_t position = first_position + slot;
      std::fill(k.begin(), k.end(), 0.0f);
      std::fill(v.begin(), v.end(), 0.0f);
      if (slot < num_written) {
        kv_(layer, head, position, tokens[static_cast<size_t>(position)], k, v);
      }
      for (int d = 0; d < kv.k_dim; ++d) {
        if (StoredBits(k_plane, KIndex(slot, d, kv.k_dim, word_values), kv.dtype) !=
            ExpectedBits(k[static_cast<size_t>(d)], kv.dtype)) {
          return absl::StrCat("key of position ", position, ", layer ", layer, ", head ", head,
                              ", dim ", d, ", slot ", slot);
        }
      }
      for (int d = 0; d < static_cast<int>(v.size()); ++d) {
        if (StoredBits(v_plane, VIndex(slot, d, kv.v_dim, word_values), kv.dtype) !=
            ExpectedBits(v[static_cast<size_t>(d)], kv.dtype)) {
          return absl::StrCat("value of position ", position, ", layer ", layer, ", head ", head,
                              ", dim ", d, ", slot ", slot);
        }
      }
    }
  }
  return "";
}

std::string CacheRig::CheckView(const kvcache::WritePlan& plan, std::span<const TokenId> tokens) {
  // What is on the queues has landed after this; the test reads memory that they write.
  for (device::Queue* queue :
       {static_cast<device::Queue*>(&device_->compute()), &device_->download()}) {
    CHECK(queue->Record().Wait(absl::Seconds(60)).ok());
  }
  const int64_t num_tokens = static_cast<int64_t>(tokens.size());
  const kvcache::SequenceView view = cache_->View(plan.slot, plan);
  for (int layer = 0; layer < options_.num_layers; ++layer) {
    int64_t position = 0;
    for (const int id : view.block_ids) {
      const kvcache::BlockPlace place = blocks().read_place(id);
      const std::string wrong =
          CheckBlock(blocks().region(place.region).Address(layer, place.index), layer, position,
                     kBlockTokens, kBlockTokens, tokens);
      if (!wrong.empty()) return absl::StrCat("sealed block ", id, ": ", wrong);
      position += kBlockTokens;
    }
    for (const kvcache::OpenSpan& span : view.open) {
      if (span.first_position != position) {
        return absl::StrCat("open span at ", span.first_position, " instead of ", position);
      }
      const int written =
          static_cast<int>(std::clamp<int64_t>(num_tokens - position, 0, span.num_tokens));
      const std::string wrong =
          CheckBlock(span.address.At(layer), layer, position, span.num_tokens, written, tokens);
      if (!wrong.empty()) return absl::StrCat("open span: ", wrong);
      position += span.num_tokens;
    }
    const int64_t end = plan.first_position + plan.num_tokens;
    if (position != end) return absl::StrCat("the view ends at ", position, " instead of ", end);
  }
  return "";
}

std::string CacheRig::CheckContents(int slot) {
  int workspace_used = 0;
  const auto plan = Prepare(slot, 1, &workspace_used);
  if (!plan.ok()) return plan.status().ToString();
  std::string wrong = CheckView(*plan, tokens_[slot]);
  cache_->AbandonWrite(*plan);
  return wrong;
}

std::string CacheRig::CheckLedger() const {
  for (const kvcache::RegionUsage& u : blocks().Usage()) {
    const bool adds_up = u.free + u.used + u.cached + u.retained == u.capacity;
    if (!adds_up || u.free < 0 || u.used < 0 || u.cached < 0 || u.retained < 0) {
      return absl::StrCat(std::string(kvcache::RegionName(u.region)), ": free ", u.free, ", used ",
                          u.used, ", cached ", u.cached, ", retained ", u.retained, " of ",
                          u.capacity);
    }
  }
  return "";
}

int64_t CacheRig::AvailableBlocks() const {
  int64_t available = 0;
  for (const int64_t blocks : blocks().Fill().available) available += blocks;
  return available;
}

}  // namespace writescope::testing
