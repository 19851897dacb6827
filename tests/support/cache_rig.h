// A KV cache on the CPU device with known contents: whatever is written can be computed again, so a
// test can say of every byte what it should be.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/device/cpu/cpu_device.h"
#include "engine/kvcache/inplace_kv_cache.h"

namespace writescope::testing {

// The key and value of a token in a layer; `v` is empty where the value lies in the key. Dims are
// the padded ones.
using KvSource = std::function<void(int layer, int kv_head, int64_t position, TokenId token,
                                    std::span<float> k, std::span<float> v)>;
// Uniform in [-1, 1), a function of the arguments alone.
KvSource RandomKv(uint64_t seed);

// A well-mixed 64-bit hash: the building stone of everything random here that must be repeatable.
uint64_t Mix(uint64_t a, uint64_t b);
// Uniform in [0, 1) from a hash.
double UnitReal(uint64_t hash);

struct CacheRigOptions {
  KvGeometry geometry = {.num_kv_heads = 2, .k_dim = 32, .v_dim = 32, .dtype = KvDtype::kF32};
  int num_layers = 2;
  int max_sequences = 4;
  int chunk_tokens = 512;                              // The longest chunk that one step writes
  std::array<int64_t, kvcache::kNumRegions> blocks{};  // device, stream, swing, host
  bool prefix_cache = true;
  bool verify = true;
  int64_t host_after_spilled_blocks = 0;
  absl::Duration wait_limit = absl::Seconds(5);
  double link_bytes_per_s = 0;
  int device_threads = 1;
};

// Wraps the device that the rig makes, for faults.
using DeviceWrapper =
    std::function<std::unique_ptr<device::CpuDevice>(std::unique_ptr<device::CpuDevice>)>;

class CacheRig {
 public:
  // Ends the process when something cannot be made: a test has no use for less.
  explicit CacheRig(const CacheRigOptions& options, const DeviceWrapper& wrap = nullptr);
  // Waits for what was submitted: it asks for keys and values here.
  ~CacheRig();

  device::CpuDevice& device() { return *device_; }
  kvcache::InplaceKvCache& cache() { return *cache_; }
  const kvcache::BlockTable& blocks() const { return cache_->blocks(); }
  const KvGeometry& geometry() const { return options_.geometry; }
  const CacheRigOptions& options() const { return options_; }
  void SetKv(KvSource source) { kv_ = std::move(source); }
  const KvSource& kv() const { return kv_; }
  // Tokens of the slot that are in the cache.
  const std::vector<TokenId>& tokens(int slot) { return tokens_[slot]; }

  int Add(int64_t expected_blocks);
  // Gives a new sequence what the cache has of `tokens`; the number found.
  int64_t Match(int slot, std::span<const TokenId> tokens, int64_t max_tokens);
  void Remove(int slot);

  // The parts of a step, in this order for every layer.
  absl::StatusOr<kvcache::WritePlan> Prepare(int slot, int num_tokens, int* workspace_used);
  void WriteLayer(const kvcache::WritePlan& plan, std::span<const TokenId> tokens, int layer);
  void Finish(const kvcache::WritePlan& plan, std::span<const TokenId> tokens);
  // All of them for one sequence.
  absl::Status Append(int slot, std::span<const TokenId> tokens);

  // Compares everything that a next token of the sequence would attend to with what was written,
  // and asks that slots past the end be zero. Empty when right, else what is wrong first.
  std::string CheckContents(int slot);
  // The same inside a step: `tokens` are those of all positions that have been written.
  std::string CheckView(const kvcache::WritePlan& plan, std::span<const TokenId> tokens);

  // free + used + cached + retained = capacity in every region; empty when it holds.
  std::string CheckLedger() const;
  // Blocks that are free or would be on demand, over all regions.
  int64_t AvailableBlocks() const;

 private:
  std::string CheckBlock(const std::byte* block, int layer, int64_t first_position, int num_tokens,
                         int num_written, std::span<const TokenId> tokens) const;

  const CacheRigOptions options_;
  std::unique_ptr<device::CpuDevice> device_;
  std::unique_ptr<kvcache::InplaceKvCache> cache_;
  KvSource kv_;
  std::map<int, std::vector<TokenId>> tokens_;  // By slot
};

// Tokens that look like text: a function of the seed.
std::vector<TokenId> RandomTokens(uint64_t seed, int64_t count);

}  // namespace writescope::testing
