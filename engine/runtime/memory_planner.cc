#include "engine/runtime/memory_planner.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/attention/link_pump.h"
#include "engine/attention/worker_team.h"
#include "engine/base/cpu_features.h"
#include "engine/base/number_text.h"
#include "engine/base/status_macros.h"
#include "engine/base/units.h"
#include "engine/kvcache/placement_plan.h"
#include "engine/model/decoder.h"
#include "engine/runtime/accelerator.h"
#include "engine/runtime/step_recordings.h"

namespace writescope::runtime {
namespace {

constexpr int64_t kPageBytes = 4096;
constexpr int kDefaultPrefillChunk = 512;
constexpr int kDefaultPrefillChunkCuda = 2048;
constexpr int64_t kMaxDefaultRingBytes = 256 * kMiB;
// Spilled blocks below which nothing is placed in `host`; see PlacementRequest.
constexpr double kHostAfterFraction = 1.0 / 16;

std::string Mebibytes(int64_t bytes) {
  return absl::StrFormat("%.1f MiB", static_cast<double>(bytes) / static_cast<double>(kMiB));
}

// Rounded up: a byte too few is not 0.0 MiB.
std::string MebibytesAtMost(int64_t bytes) {
  return absl::StrFormat(
      "%.1f MiB", std::ceil(10 * static_cast<double>(bytes) / static_cast<double>(kMiB)) / 10);
}

// OK when what is in the plan so far fits the budget.
absl::Status CheckFitsBudget(const MemoryPlan& plan, bool on_device) {
  const int64_t budget_bytes = on_device ? plan.device_budget_bytes : plan.host_budget_bytes;
  const int64_t total_bytes = on_device ? plan.device_total_bytes : plan.host_total_bytes;
  if (total_bytes <= budget_bytes) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      on_device ? "a device" : "a host", " budget of ", Mebibytes(budget_bytes),
      " is too small by ", MebibytesAtMost(total_bytes - budget_bytes), ":\n", plan.ToString(),
      on_device ? "Raise --vram-budget, or lower --prefill-chunk, --max-sequences or --ring-size."
                : "Raise --host-budget, or lower --max-sequences."));
}

class Planner {
 public:
  Planner(const EngineOptions& options, const model::ModelConfig& config)
      : config_(config), geometry_(model::GeometryOf(config, options.kv_dtype)) {
    result_.options = options;
    result_.plan.device_budget_bytes = options.vram_budget_bytes;
  }

  absl::StatusOr<SizedPlan> Run(int64_t weight_bytes, const ops::OpsFootprint& footprint) {
    FillDefaults();
    const EngineOptions& o = result_.options;
    ModelRunner::Options& runner = result_.runner;
    runner.kv_dtype = o.kv_dtype;
    runner.max_sequences = o.max_sequences;
    runner.prefill_chunk_tokens = o.prefill_chunk_tokens;
    runner.num_workers = o.cpu_workers;
    runner.wait_limit = o.wait_limit;
    // A real device's hand-offs take microseconds if nobody sleeps; the CPU device computes on the
    // cores that would spin.
    if (o.device == DeviceKind::kCuda) runner.nap = absl::ZeroDuration();
    runner.cache.prefix_cache = o.prefix_cache;
    runner.cache.retention = o.retention;
    runner.cache.verify = o.verify_blocks;
    const ModelRunner::FixedBytes fixed =
        ModelRunner::PlanBytes(config_, footprint.activation_bytes, runner);
    result_.weight_bytes = weight_bytes;
    if (const int64_t reserve_bytes = DeviceReserveBytes(o); reserve_bytes > 0) {
      AddItem("CUDA context and libraries, at most", true, reserve_bytes);
    }
    AddItem("weights", true, weight_bytes);
    AddItem("operations workspace", true,
            footprint.workspace_bytes(
                model::OpsLimitsOf(config_, std::max(o.prefill_chunk_tokens, o.max_sequences))));
    AddItem("activations", true, fixed.activations);
    if (footprint.recording_layer_bytes > 0) {
      // All kinds of steps that there are of each size.
      int all = StepRecordings::Cost({.spilled = false}) +
                StepRecordings::Cost({.spilled = true, .rows = 2});
      if (o.micro_batching != MicroBatching::kOne) {
        all += StepRecordings::Cost({.spilled = true, .rows = 2, .first_rows = 1});
      }
      runner.max_recordings = std::min(o.max_step_graphs, all * o.max_sequences);
      AddItem("graphs of decode steps, at most", true,
              runner.max_recordings * config_.num_layers * footprint.recording_layer_bytes);
    }
    AddItem("open tails and prefill workspace", true, fixed.tails_and_workspace);
    RETURN_IF_ERROR(SizeRing());
    AddItem("queries and partials", false, fixed.handoff_host);
    AddItem("logits", false, fixed.logits_host);
    RETURN_IF_ERROR(CheckFitsBudget(result_.plan, /*on_device=*/false));
    RETURN_IF_ERROR(SizeRegions());
    return result_;
  }

 private:
  void FillDefaults() {
    EngineOptions& o = result_.options;
    const int cores = UsableCores();
    if (o.cpu_workers > 0) o.tune_workers = false;
    if (o.cpu_workers == 0) o.cpu_workers = attention::DefaultWorkers(cores);
    if (o.device_threads == 0) o.device_threads = cores;
    if (o.prefill_chunk_tokens == 0) {
      o.prefill_chunk_tokens =
          o.device == DeviceKind::kCuda ? kDefaultPrefillChunkCuda : kDefaultPrefillChunk;
    }
    // Chunks end on block borders, so that what a chunk fills goes around the tails.
    o.prefill_chunk_tokens =
        static_cast<int>(RoundUp(std::max(o.prefill_chunk_tokens, kBlockTokens), kBlockTokens));
    if (o.host_budget_bytes == 0) o.host_budget_bytes = UsableHostMemoryBytes() / 2;
    if (o.max_context_tokens == 0 || o.max_context_tokens > config_.max_position_embeddings) {
      o.max_context_tokens = config_.max_position_embeddings;
    }
    result_.plan.host_budget_bytes = o.host_budget_bytes;
  }

  void AddItem(const std::string& name, bool on_device, int64_t size_bytes) {
    MemoryPlan& plan = result_.plan;
    const int64_t rounded = RoundUp(size_bytes, kPageBytes);
    plan.items.push_back({.name = name, .on_device = on_device, .size_bytes = rounded});
    (on_device ? plan.device_total_bytes : plan.host_total_bytes) += rounded;
  }

  absl::Status SizeRing() {
    EngineOptions& o = result_.options;
    MemoryPlan& plan = result_.plan;
    const int64_t min_bytes = attention::LinkPump::MinRingBytes(geometry_);
    const int64_t room_bytes = plan.device_budget_bytes - plan.device_total_bytes;
    if (o.ring_bytes == 0) {
      o.ring_bytes =
          std::clamp<int64_t>(room_bytes / 8, min_bytes, std::max(min_bytes, kMaxDefaultRingBytes));
    }
    if (o.ring_bytes < min_bytes) {
      return absl::InvalidArgumentError(absl::StrCat(
          "a ring of ", o.ring_bytes, " bytes; this model needs at least ", min_bytes));
    }
    result_.runner.ring_bytes = o.ring_bytes;
    AddItem("staging ring", true, o.ring_bytes);
    return CheckFitsBudget(plan, /*on_device=*/true);
  }

  absl::Status SizeRegions() {
    EngineOptions& o = result_.options;
    MemoryPlan& plan = result_.plan;
    const int64_t unit_bytes = geometry_.block_bytes() * config_.num_layers;
    plan.kv_bytes_per_token = unit_bytes / kBlockTokens;
    // No more than what all sequences at full length would use.
    const int64_t most_blocks = o.max_sequences * CeilDiv(o.max_context_tokens, kBlockTokens);
    const int64_t device_blocks =
        std::min(most_blocks, (plan.device_budget_bytes - plan.device_total_bytes) / unit_bytes);
    const int64_t host_room = plan.host_budget_bytes - plan.host_total_bytes;
    const int64_t host_blocks = std::min(host_room / unit_bytes, most_blocks);
    auto& blocks = result_.runner.cache.blocks;
    blocks = kvcache::DivideHostBlocks(host_blocks, o.min_cpu_share, o.max_cpu_share);
    blocks[static_cast<size_t>(kvcache::RegionKind::kDevice)] = device_blocks;
    result_.runner.cache.host_after_spilled_blocks =
        static_cast<int64_t>(static_cast<double>(host_blocks) * kHostAfterFraction);
    for (const kvcache::RegionKind kind : kvcache::kAllRegions) {
      AddItem(absl::StrCat("KV region ", std::string(kvcache::RegionName(kind))),
              !kvcache::IsSpilled(kind), blocks[static_cast<size_t>(kind)] * unit_bytes);
    }
    plan.device_kv_tokens = device_blocks * kBlockTokens;
    plan.host_kv_tokens = host_blocks * kBlockTokens;
    const int64_t capacity = plan.device_kv_tokens + plan.host_kv_tokens;
    if (capacity < kBlockTokens) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "no room for KV: a block of 64 tokens takes ", Mebibytes(unit_bytes),
          ", the host budget of ", Mebibytes(plan.host_budget_bytes), " has ", Mebibytes(host_room),
          " left\n", plan.ToString(), "Raise --host-budget or --vram-budget."));
    }
    // The open tail holds what does not fill a block.
    o.max_context_tokens =
        static_cast<int>(std::min<int64_t>(o.max_context_tokens, capacity + kBlockTokens - 1));
    plan.max_context_tokens = o.max_context_tokens;
    return absl::OkStatus();
  }

  const model::ModelConfig& config_;
  const KvGeometry geometry_;
  SizedPlan result_;
};

}  // namespace

std::string MemoryPlan::ToString() const {
  std::string text;
  for (const bool on_device : {true, false}) {
    absl::StrAppendFormat(&text, "%s memory: %s of a budget of %s\n", on_device ? "device" : "host",
                          Mebibytes(on_device ? device_total_bytes : host_total_bytes),
                          Mebibytes(on_device ? device_budget_bytes : host_budget_bytes));
    for (const Item& item : items) {
      if (item.on_device != on_device) continue;
      absl::StrAppendFormat(&text, "  %-34s %12s\n", item.name, Mebibytes(item.size_bytes));
    }
  }
  absl::StrAppendFormat(&text,
                        "KV cache: %d bytes a token; %d tokens on the device, %d in host memory; "
                        "context up to %d tokens\n",
                        kv_bytes_per_token, device_kv_tokens, host_kv_tokens, max_context_tokens);
  return text;
}

absl::Status ValidateOptions(const EngineOptions& o) {
  const auto bad = [](std::string_view name, auto value, std::string_view rule) {
    return absl::InvalidArgumentError(
        absl::StrCat(std::string(name), " is ", value, "; it has to be ", std::string(rule)));
  };
  if (o.model_dir.empty()) return absl::InvalidArgumentError("no model folder was given");
  if (o.vram_budget_bytes <= 0) return bad("the VRAM budget", o.vram_budget_bytes, "above 0 bytes");
  if (o.host_budget_bytes < 0) return bad("the host budget", o.host_budget_bytes, "at least 0");
  if (o.max_context_tokens < 0) return bad("the context limit", o.max_context_tokens, "at least 0");
  if (o.max_sequences < 1 || o.max_sequences > 4096) {
    return bad("the number of sequences", o.max_sequences, "in [1, 4096]");
  }
  if (o.max_queue < 1) return bad("the queue limit", o.max_queue, "at least 1");
  if (o.prefill_chunk_tokens < 0 || o.prefill_chunk_tokens > 65536) {
    return bad("the prefill chunk", o.prefill_chunk_tokens, "in [0, 65536]");
  }
  if (o.max_step_graphs < 0 || o.max_step_graphs > 4096) {
    return bad("the number of step graphs", o.max_step_graphs, "in [0, 4096]");
  }
  if (o.ring_bytes < 0) return bad("the ring size", o.ring_bytes, "at least 0");
  if (o.cpu_workers < 0 || o.cpu_workers > 1024) {
    return bad("the number of CPU workers", o.cpu_workers, "in [0, 1024]");
  }
  if (o.device_threads < 0 || o.device_threads > 1024) {
    return bad("the number of device threads", o.device_threads, "in [0, 1024]");
  }
  if (!(o.min_cpu_share >= 0 && o.min_cpu_share <= o.max_cpu_share && o.max_cpu_share <= 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("the share interval is [", NumberText(o.min_cpu_share), ", ",
                     NumberText(o.max_cpu_share), "]; it has to lie in [0, 1], in order"));
  }
  if (!(o.link_bytes_per_s >= 0) || !std::isfinite(o.link_bytes_per_s)) {
    return bad("the link's pace", o.link_bytes_per_s, "at least 0 and finite");
  }
  if (o.wait_limit <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError("the wait limit has to be above 0");
  }
  return absl::OkStatus();
}

absl::StatusOr<SizedPlan> PlanEngineMemory(const EngineOptions& options,
                                           const model::ModelConfig& config, int64_t weight_bytes,
                                           const ops::OpsFootprint& footprint) {
  return Planner(options, config).Run(weight_bytes, footprint);
}

absl::Status CheckFitsMachine(const MemoryPlan& plan, DeviceKind device, int64_t usable_bytes) {
  const bool device_is_host = device == DeviceKind::kCpu;
  const int64_t taken_bytes =
      plan.host_total_bytes + (device_is_host ? plan.device_total_bytes : 0);
  if (taken_bytes <= usable_bytes) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "the plan takes ", Mebibytes(taken_bytes), " of host memory",
      device_is_host ? ", the CPU device's included" : "", "; cgroup and machine allow ",
      Mebibytes(usable_bytes), ", ", MebibytesAtMost(taken_bytes - usable_bytes),
      " less. Lower --host-budget", device_is_host ? " or --vram-budget" : "",
      ", or raise the limit of the container."));
}

}  // namespace writescope::runtime
