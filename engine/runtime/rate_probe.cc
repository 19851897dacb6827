#include "engine/runtime/rate_probe.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/attention/cpu_attention.h"
#include "engine/base/bf16.h"
#include "engine/base/status_macros.h"
#include "engine/base/units.h"
#include "engine/kernels/attention_partial.h"
#include "engine/model/decoder.h"

namespace writescope::runtime {
namespace {

constexpr int64_t kCudaHostBytes = 2 * kGiB;
constexpr int64_t kCudaDeviceBytes = 8 * kMiB;
constexpr int64_t kCudaCopyBytes = 2 * kMiB;
constexpr double kCudaSeconds = 0.25;

constexpr int64_t kPatternBytes = kMiB;
// A link at the slowest pace that can be set takes a quarter of a second for a copy.
constexpr absl::Duration kCopyLimit = absl::Seconds(10);

int64_t HostBytes(const RateProbeOptions& options) {
  if (!options.memory.empty()) return static_cast<int64_t>(options.memory.size());
  return std::max(options.host_bytes, options.geometry.block_bytes());
}

// Draws values of KV; they repeat, but in no cache's length.
void Fill(std::byte* memory, int64_t size_bytes, KvDtype dtype) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  const int64_t value_bytes = KvDtypeBytes(dtype);
  std::vector<std::byte> pattern(kPatternBytes);
  for (int64_t at = 0; at < kPatternBytes; at += value_bytes) {
    const float value = normal(random);
    const uint16_t half = FloatToBf16(value);
    std::memcpy(&pattern[static_cast<size_t>(at)],
                dtype == KvDtype::kBf16 ? static_cast<const void*>(&half) : &value,
                static_cast<size_t>(value_bytes));
  }
  for (int64_t at = 0; at < size_bytes; at += kPatternBytes) {
    std::memcpy(memory + at, pattern.data(),
                static_cast<size_t>(std::min(kPatternBytes, size_bytes - at)));
  }
}

// The running state of a thread's rows, and what its kernel keeps from call to call.
struct State {
  explicit State(const RateProbeOptions& options)
      : q(static_cast<size_t>(options.geometry.k_dim)),
        o(Rows(options) * static_cast<size_t>(options.geometry.v_dim)),
        m(Rows(options), kernels::kEmptyLse),
        l(Rows(options)),
        kept(kernels::KeptState::kBytes / sizeof(Line)) {
    std::mt19937 random(2);
    std::normal_distribution<float> normal(
        0, 1 / std::sqrt(static_cast<float>(options.geometry.k_dim)));
    for (float& value : q) value = normal(random);
    for (size_t row = 0; row < Rows(options); ++row) {
      q_rows.push_back(q.data());
      o_rows.push_back(&o[row * static_cast<size_t>(options.geometry.v_dim)]);
      m_rows.push_back(&m[row]);
      l_rows.push_back(&l[row]);
    }
  }
  static size_t Rows(const RateProbeOptions& options) {
    return static_cast<size_t>(options.query_group) *
           static_cast<size_t>(options.geometry.num_kv_heads);
  }

  struct alignas(64) Line {
    std::byte bytes[64];
  };
  std::vector<float> q, o, m, l;
  std::vector<const float*> q_rows;
  std::vector<float*> o_rows, m_rows, l_rows;
  std::vector<Line> kept;
};

// Attends to all blocks of the buffer, over and over, until told to stop: one sequence, claim by
// claim as CpuAttention's workers do.
class CpuLoad {
 public:
  CpuLoad(const RateProbeOptions& options, const std::byte* memory)
      : options_(options),
        memory_(memory),
        num_blocks_(HostBytes(options) / options.geometry.block_bytes()) {}

  // Bytes attended to by one thread of `num_threads` until `stop`.
  int64_t Run(const std::atomic<bool>& stop, int64_t thread, int64_t num_threads) const {
    const KvGeometry& kv = options_.geometry;
    State state(options_);
    const kernels::AttentionVariant& variant = attention::CpuAttention::VariantFor(
        kv, options_.query_group * kv.num_kv_heads, options_.products);
    // As many blocks at a time as a worker claims while much is left.
    const int64_t claim_blocks =
        std::clamp<int64_t>(attention::WorkerClaims::kMaxClaimBytes / kv.block_bytes(), 1,
                            std::max<int64_t>(1, num_blocks_ / num_threads));
    std::vector<kernels::KvHeadBlock> blocks, next;
    int64_t bytes = 0;
    // Each thread in a part of its own, so that none reads what another has brought into a cache.
    int64_t first = num_blocks_ * thread / num_threads;
    while (!stop.load(std::memory_order_relaxed)) {
      if (first + claim_blocks > num_blocks_) first = 0;
      const int64_t behind = first + claim_blocks;
      if (options_.read != nullptr) {
        options_.read(memory_ + first * kv.block_bytes(), claim_blocks * kv.block_bytes());
      } else {
        ListHeads(first, claim_blocks * kv.num_kv_heads, &blocks);
        ListHeads(behind + claim_blocks > num_blocks_ ? 0 : behind, kernels::kBlocksAhead, &next);
        variant.run(
            {.k_dim = kv.k_dim,
             .v_dim = kv.v_dim,
             .value_in_key = kv.value_in_key,
             .dtype = kv.dtype,
             .blocks = blocks,
             .num_heads = kv.num_kv_heads,
             .next = next,
             .num_rows = options_.query_group,
             .q = state.q_rows.data(),
             .o = state.o_rows.data(),
             .m = state.m_rows.data(),
             .l = state.l_rows.data(),
             .kept = {.memory = state.kept.front().bytes, .is_left = bytes > 0, .leave = true}});
      }
      bytes += claim_blocks * kv.block_bytes();
      first = behind;
    }
    return bytes;
  }

 private:
  // `count` heads of blocks from block `first` on, as they lie; fewer at the end of the buffer.
  void ListHeads(int64_t first, int64_t count, std::vector<kernels::KvHeadBlock>* heads) const {
    const KvGeometry& kv = options_.geometry;
    count = std::min(count, (num_blocks_ - first) * kv.num_kv_heads);
    heads->clear();
    for (int64_t i = 0; i < count; ++i) {
      const std::byte* k = memory_ + (first + i / kv.num_kv_heads) * kv.block_bytes() +
                           i % kv.num_kv_heads * kv.head_bytes();
      heads->push_back(
          {.k = k, .v = k + kv.k_plane_bytes(), .num_tokens = kBlockTokens, .first_position = 0});
    }
  }

  const RateProbeOptions& options_;
  const std::byte* memory_;
  const int64_t num_blocks_;
};

struct Measured {
  double cpu_bytes_per_s = 0;
  double link_bytes_per_s = 0;
};

// Which sides are at work.
struct Sides {
  bool cpu = false;
  bool link = false;
};

absl::StatusOr<Measured> Measure(device::Device& device, const RateProbeOptions& options,
                                 const CpuLoad& load, const std::byte* host, std::byte* on_device,
                                 Sides sides) {
  std::atomic<bool> stop{false};
  std::atomic<int64_t> cpu_bytes{0};
  std::vector<std::thread> threads;
  const double began_s = device::NowSeconds();
  for (int i = 0; sides.cpu && i < options.num_workers; ++i) {
    threads.emplace_back([&, i] { cpu_bytes += load.Run(stop, i, options.num_workers); });
  }
  int64_t link_bytes = 0;
  const int64_t copy_bytes =
      std::min({options.copy_bytes, options.device_bytes, HostBytes(options)});
  device::Queue& queue = device.upload();
  device::Event last;
  absl::Status copied;
  while (copied.ok() && device::NowSeconds() - began_s < options.seconds) {
    if (!sides.link) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      continue;
    }
    const device::Event before = last;
    const int64_t places = HostBytes(options) / copy_bytes;
    queue.Copy(on_device, host + link_bytes / copy_bytes % places * copy_bytes, copy_bytes);
    last = queue.Record();
    link_bytes += copy_bytes;
    // Two in flight, as the pump keeps them.
    copied = before.Wait(kCopyLimit);
  }
  stop.store(true);
  for (std::thread& thread : threads) thread.join();
  const double cpu_s = device::NowSeconds() - began_s;
  if (copied.ok()) copied = last.Wait(kCopyLimit);
  const double link_s = device::NowSeconds() - began_s;
  if (!copied.ok()) {
    // What is still under way uses the caller's memory.
    device::AwaitIdle({&queue}, "rate probe");
    return absl::Status(copied.code(),
                        absl::StrCat("rate probe: copies of ", copy_bytes, " bytes to the device, ",
                                     link_bytes, " bytes in all: ", copied.message()));
  }
  return Measured{.cpu_bytes_per_s = static_cast<double>(cpu_bytes.load()) / cpu_s,
                  .link_bytes_per_s = static_cast<double>(link_bytes) / link_s};
}

}  // namespace

RateProbeOptions ProbeOptionsFor(const EngineOptions& options, const model::ModelConfig& config,
                                 int64_t host_total_bytes) {
  const KvGeometry geometry = model::GeometryOf(config, options.kv_dtype);
  RateProbeOptions probe{
      .geometry = geometry,
      .query_group = config.num_heads / geometry.num_kv_heads,
      .num_workers = options.cpu_workers,
      .host_bytes = std::min<int64_t>(host_total_bytes, 8 * kMiB),
      .device_bytes = std::min<int64_t>(options.vram_budget_bytes / 4, 2 * kMiB)};
  if (options.device != DeviceKind::kCuda) return probe;
  probe.seconds = kCudaSeconds;
  probe.host_bytes = std::min(host_total_bytes, kCudaHostBytes);
  probe.device_bytes = kCudaDeviceBytes;
  probe.copy_bytes = kCudaCopyBytes;
  if (options.compute_dtype != ComputeDtype::kF32) {
    probe.products = kernels::AttentionProducts::kBf16;
  }
  return probe;
}

absl::StatusOr<roofline::MachineProfile> ProbeRates(device::Device& device,
                                                    const RateProbeOptions& options) {
  device::Buffer own;
  const std::byte* host = options.memory.data();
  if (options.memory.empty()) {
    ASSIGN_OR_RETURN(own, device.AllocateHost(HostBytes(options), device::HostMemory::kPageLocked,
                                              "rate probe"));
    Fill(own.data(), HostBytes(options), options.geometry.dtype);
    host = own.data();
  }
  device::Buffer own_on_device;
  std::byte* on_device = options.device_memory.data();
  if (options.device_memory.empty()) {
    ASSIGN_OR_RETURN(own_on_device, device.AllocateDevice(options.device_bytes, "rate probe"));
    on_device = own_on_device.data();
  }
  const CpuLoad load(options, host);
  const auto measure = [&](Sides sides) {
    return Measure(device, options, load, host, on_device, sides);
  };
  ASSIGN_OR_RETURN(const Measured cpu, measure({.cpu = true}));
  ASSIGN_OR_RETURN(const Measured link, measure({.link = true}));
  ASSIGN_OR_RETURN(const Measured both, measure({.cpu = true, .link = true}));
  roofline::MachineProfile profile;
  profile.name = device.name();
  profile.measured = true;
  profile.source = "measured by the worker at start";
  profile.rates.cpu_alone = cpu.cpu_bytes_per_s;
  profile.rates.cpu_with_link = std::min(both.cpu_bytes_per_s, cpu.cpu_bytes_per_s);
  profile.rates.link_alone = link.link_bytes_per_s;
  profile.rates.link_with_cpu = std::min(both.link_bytes_per_s, link.link_bytes_per_s);
  profile.rates.device = cpu.cpu_bytes_per_s;
  profile.cpu_workers = options.num_workers;
  profile.device_budget_bytes = device.device_budget_bytes();
  return profile;
}

}  // namespace writescope::runtime
