// The front door of the engine: everything that a server does with a model goes through here.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/base/clock.h"
#include "engine/base/tile_layout.h"
#include "engine/base/units.h"
#include "engine/roofline/machine_profile.h"
#include "engine/roofline/share_table.h"
#include "engine/runtime/request.h"
#include "engine/runtime/step_stats.h"

namespace writescope::runtime {

enum class DeviceKind { kCpu, kCuda };
enum class CutMode { kPlanned, kMeet };
// Of decode steps over spilled KV. kTwo: parts of the batch take turns, so that one is attended to
// while the other's dense work runs. kAuto: where that is expected to be faster.
enum class MicroBatching { kAuto, kOne, kTwo };
// kAuto: bf16 on CUDA, float32 on the CPU device, which has nothing else.
enum class ComputeDtype { kAuto, kF32, kBf16 };
// kSource: as in the checkpoint, in the compute type. kInt4: routed experts are quantised on load.
enum class WeightsFormat { kSource, kInt4 };
// kDummy: seeded random weights of the shapes in config.json, for benchmarks; no weights are read.
enum class LoadFormat { kCheckpoint, kDummy };
// Who waits for the CPU's part of attention: the device itself, so that work is submitted ahead, or
// the host, for tools that serialise the device. kAuto tells them apart.
enum class DeviceWaits { kAuto, kDevice, kHost };

// 0 means "chosen by the engine" where a field says so.
struct EngineOptions {
  std::string model_dir;
  LoadFormat load_format = LoadFormat::kCheckpoint;
  WeightsFormat weights = WeightsFormat::kSource;
  DeviceKind device = DeviceKind::kCpu;
  int device_ordinal = 0;  // Of the CUDA devices that are visible
  ComputeDtype compute_dtype = ComputeDtype::kAuto;
  DeviceWaits device_waits = DeviceWaits::kAuto;
  bool force_simt = false;        // CUDA without tensor cores, as before sm_80; for tests
  bool allow_pageable = false;    // Go on where host memory cannot be page-locked
  int64_t vram_budget_bytes = 0;  // Required
  int64_t host_budget_bytes = 0;  // 0: half of what the cgroup or the machine allows
  KvDtype kv_dtype = KvDtype::kBf16;
  int max_context_tokens = 0;  // 0: the model's, cut to what fits
  int max_sequences = 16;
  int max_queue = 256;
  int prefill_chunk_tokens = 0;  // 0: 2048 on CUDA, 512 on the CPU device
  int64_t ring_bytes = 0;        // 0: 256 MiB on CUDA, an eighth of the room on the CPU device
  // 0: usable cores - 2, at least 1; and of these as many attend as steps show to be best.
  int cpu_workers = 0;
  bool tune_workers = true;  // Only where cpu_workers is 0
  int device_threads = 0;    // CPU device: 0 is all usable cores
  CutMode cut = CutMode::kMeet;
  MicroBatching micro_batching = MicroBatching::kAuto;
  // Interval of shares reachable without moving a byte: rigid host bytes are its lower end, rigid
  // stream bytes end it above. [0, 1] places everything in swing.
  double min_cpu_share = 0;
  double max_cpu_share = 1;
  double link_bytes_per_s = 0;  // CPU device: pace of the simulated link; 0 is unpaced
  bool prefix_cache = true;
  bool retention = true;
  absl::Duration wait_limit = absl::Seconds(2);  // Of any wait between the two processors
  absl::Duration request_time_limit = absl::InfiniteDuration();
  absl::Duration progress_interval = absl::Seconds(1);
  // Checks the CRC of every sealed block before it is attended to. For tests; slow.
  bool verify_blocks = false;
  // Shapes of decode steps of which recordings are kept, by their cost (StepRecordings). 0: none.
  int max_step_graphs = 16;
  std::optional<roofline::MachineProfile> machine_profile;  // Start-up rates; else probed at start
};

// What the engine takes, before it takes it. Bytes.
struct MemoryPlan {
  struct Item {
    std::string name;
    bool on_device = false;
    int64_t size_bytes = 0;
  };
  std::vector<Item> items;
  int64_t device_budget_bytes = 0;
  int64_t device_total_bytes = 0;
  int64_t host_budget_bytes = 0;
  int64_t host_total_bytes = 0;
  int64_t kv_bytes_per_token = 0;
  int64_t device_kv_tokens = 0;
  int64_t host_kv_tokens = 0;
  int max_context_tokens = 0;
  // Lines to print.
  std::string ToString() const;
};

struct ModelInfo {
  std::string name;  // Last folder of model_dir
  std::string architecture;
  int vocab_size = 0;
  int num_layers = 0;
  std::string kv_dtype;
  std::string weight_dtype;
  int64_t kv_bytes_per_token = 0;
  std::optional<TokenId> bos_token;
  std::vector<TokenId> eos_tokens;
  bool has_tokenizer = false;
  std::string chat_template;
  std::string device;
  int max_context_tokens = 0;
  int max_resident_context_tokens = 0;
  int max_sequences = 0;
  int max_queue = 0;
};

// Limits of a request that do not depend on the model.
inline constexpr int kMaxStopStrings = 16;
inline constexpr int kMaxStopStringBytes = 256;
inline constexpr int kMaxLogprobs = 20;
inline constexpr int kMaxStopTokenIds = 256;

enum class RegionName { kDevice, kStream, kSwing, kHost };
struct RegionState {
  RegionName region;
  int64_t capacity_bytes = 0;
  int64_t used_bytes = 0;
  int64_t cached_bytes = 0;
  int64_t retained_bytes = 0;
  bool page_locked = false;
};

enum class ShareOutcome { kApplied, kClamped, kStale };
struct ShareUpdate {
  std::string controller_id;
  int64_t generation = 0;
  roofline::ShareTable table;
  absl::Duration valid_for;
  std::string reason;
};
struct ShareState {
  int64_t generation = 0;
  std::string controller_id;  // Empty: the engine's own roofline
  roofline::ShareTable table;
  absl::Duration expires_in;
  double min_cpu_share = 0;
  double max_cpu_share = 1;
  double last_cpu_share = 0;
  std::optional<absl::Duration> since_update;
};
struct ShareReply {
  ShareOutcome outcome = ShareOutcome::kApplied;
  ShareState in_force;
};

// Running totals since the start, and gauges of now. For metrics and GetWorkerState.
struct EngineState {
  int running_requests = 0;
  int waiting_requests = 0;
  // Of those, the ones that found no room when the engine last looked; the others are new.
  int held_requests = 0;
  std::vector<RegionState> regions;
  int64_t moved_bytes_total = 0;
  int64_t steps_total = 0;
  int64_t prompt_tokens_total = 0;
  int64_t generated_tokens_total = 0;
  int64_t prefix_query_tokens_total = 0;
  int64_t prefix_hit_tokens_device_total = 0;
  int64_t prefix_hit_tokens_host_total = 0;
  int64_t preemptions_pause_total = 0;
  int64_t preemptions_drop_total = 0;
  int64_t failed_steps_total = 0;
  int64_t ping_pong_steps_total = 0;      // Decode steps of two micro-batches
  int64_t replayed_steps_total = 0;       // Resident decode steps that were launched as a graph
  int64_t step_graph_failures_total = 0;  // Above 0: no graph is made any more
  int64_t nan_logits_total = 0;
  int64_t upload_bytes_total = 0;    // Host to device, for attention
  int64_t download_bytes_total = 0;  // Device to host: commits
  int64_t cpu_attended_bytes_total = 0;
  int64_t device_attended_bytes_total = 0;
  double cpu_busy_seconds_total = 0;
  double device_attention_seconds_total = 0;
  double link_busy_seconds_total = 0;
  int cpu_workers = 0;
  CutMode cut = CutMode::kMeet;
  bool link_simulated = false;
  double link_pace_bytes_per_s = 0;
  std::optional<StepStats> last_decode_step;
  // Set when the engine cannot go on; no request is taken any more.
  absl::Status health;
};

// Times of one finished request, for histograms.
struct RequestTimes {
  std::string request_id;
  absl::Status status;
  std::optional<FinishReason> reason;
  Usage usage;
  double queue_seconds = 0;
  double prefill_seconds = 0;
  double first_token_seconds = -1;  // From Submit; below 0: no token
  double decode_seconds = 0;
  double total_seconds = 0;
  double cancel_seconds = -1;  // From Cancel or a passed deadline until its blocks were free
};

// Called by the engine thread; must return at once.
class EngineObserver {
 public:
  virtual ~EngineObserver() = default;
  virtual void OnStep(const StepStats& stats) = 0;
  virtual void OnInterTokenSeconds(double seconds) = 0;
  virtual void OnRequestDone(const RequestTimes& times) = 0;
};

// Thread-safe. Owns the engine thread, the CPU workers, the device and all KV memory.
class Engine {
 public:
  // Reads and checks the checkpoint, and plans memory, without allocating any of it.
  static absl::StatusOr<MemoryPlan> Plan(const EngineOptions& options);
  // Plan, then everything: memory, weights, threads. `observer` may be null and must outlive the
  // engine.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(const EngineOptions& options,
                                                        EngineObserver* observer);
  virtual ~Engine() = default;

  virtual const MemoryPlan& plan() const = 0;
  virtual const ModelInfo& model() const = 0;

  // Checks and queues a request; the answer goes to `sink`. The id by which Cancel finds it.
  // Errors carry an absl payload kErrorReasonUrl with a reason word (see error_reason.h):
  //   INVALID_ARGUMENT      a parameter out of range, empty prompt, id outside the vocabulary,
  //                         invalid UTF-8, text without a tokenizer, prompt longer than the context
  //   ALREADY_EXISTS        request_id in flight
  //   RESOURCE_EXHAUSTED    queue full
  //   UNAVAILABLE           draining, or failed
  virtual absl::StatusOr<RequestId> Submit(GenerateRequest request,
                                           std::shared_ptr<GenerateSink> sink) = 0;
  // The request ends with CANCELLED (OnDone) soon; nothing if it has ended already.
  virtual void Cancel(RequestId id) = 0;
  // Ends the request with finish reason kAborted. False: not in flight.
  virtual bool Abort(std::string_view request_id) = 0;

  virtual absl::StatusOr<std::vector<TokenId>> Tokenize(const std::vector<PromptSegment>& segments,
                                                        std::optional<bool> add_bos) const = 0;
  virtual std::string TokenBytes(TokenId id) const = 0;
  // INVALID_ARGUMENT for an id outside the vocabulary; FAILED_PRECONDITION without a tokenizer.
  virtual absl::StatusOr<std::string> Detokenize(const std::vector<TokenId>& ids,
                                                 bool keep_special) const = 0;

  // INVALID_ARGUMENT for a share that is NaN or outside [0, 1], an ill-formed table or lease.
  virtual absl::StatusOr<ShareReply> SetCpuShare(const ShareUpdate& update) = 0;
  virtual ShareState share() const = 0;
  virtual roofline::MachineProfile machine_profile() const = 0;
  virtual absl::Status SetLinkPace(double bytes_per_s) = 0;
  virtual EngineState state() const = 0;

  // New requests are refused from now on.
  virtual void StartDrain() = 0;
  // Waits until no request is left, at most `timeout`; true when none is.
  virtual bool AwaitIdle(absl::Duration timeout) = 0;
  // Ends all requests (UNAVAILABLE) and the threads. Called by the destructor too.
  virtual void Stop() = 0;
  // When the engine thread last went round; a liveness probe compares it with now.
  virtual absl::Time last_heartbeat() const = 0;
};

}  // namespace writescope::runtime
