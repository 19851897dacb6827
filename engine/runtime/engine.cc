#include "engine/runtime/engine.h"

#include <algorithm>
#include <condition_variable>
#include <filesystem>
#include <mutex>
#include <random>
#include <span>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "engine/base/check.h"
#include "engine/base/clock.h"
#include "engine/base/cpu_features.h"
#include "engine/base/log.h"
#include "engine/base/status_macros.h"
#include "engine/base/timed_wait.h"
#include "engine/device/device.h"
#include "engine/model/config.h"
#include "engine/model/device_weights.h"
#include "engine/model/weights.h"
#include "engine/ops/ops.h"
#include "engine/runtime/accelerator.h"
#include "engine/runtime/active_request.h"
#include "engine/runtime/cpu_share_slot.h"
#include "engine/runtime/error_reason.h"
#include "engine/runtime/memory_planner.h"
#include "engine/runtime/model_runner.h"
#include "engine/runtime/rate_probe.h"
#include "engine/runtime/request_validation.h"
#include "engine/runtime/step_loop.h"
#include "engine/runtime/step_model.h"
#include "engine/tokenizer/tokenizer.h"
#include "engine/tokenizer/tokenizer_config.h"

namespace writescope::runtime {
namespace {

ops::WeightFormat ExpertFormat(const EngineOptions& options) {
  return options.weights == WeightsFormat::kInt4 ? ops::WeightFormat::kInt4
                                                 : ops::WeightFormat::kSource;
}

// Everything read from the folder before memory is taken.
struct LoadedModel {
  model::ModelConfig config;
  model::ModelWeights weights;
  SizedPlan sized;
};

absl::StatusOr<LoadedModel> LoadAndPlan(const EngineOptions& options) {
  RETURN_IF_ERROR(ValidateOptions(options));
  RETURN_IF_ERROR(CheckAccelerator(options));
  ASSIGN_OR_RETURN(model::ModelConfig config, model::ReadModelConfig(options.model_dir));
  ASSIGN_OR_RETURN(model::ModelWeights weights,
                   options.load_format == LoadFormat::kDummy
                       ? model::DummyWeights(config)
                       : model::LoadWeights(options.model_dir, config));
  const ops::OpsFootprint footprint = AcceleratorFootprint(options);
  const int64_t weight_bytes =
      model::DeviceWeights::Bytes(config, weights, footprint, ExpertFormat(options));
  ASSIGN_OR_RETURN(SizedPlan sized, PlanEngineMemory(options, config, weight_bytes, footprint));
  if (options.max_context_tokens > config.max_position_embeddings) {
    Log(LogLevel::kWarning, "the context asked for is longer than the model's, which is taken",
        {{"asked", options.max_context_tokens}, {"model", config.max_position_embeddings}});
  }
  return LoadedModel{std::move(config), std::move(weights), std::move(sized)};
}

ModelInfo DescribeModel(const LoadedModel& loaded, const tokenizer::Tokenizer* tokenizer) {
  const EngineOptions& options = loaded.sized.options;
  const MemoryPlan& plan = loaded.sized.plan;
  ModelInfo info;
  std::filesystem::path dir(options.model_dir);
  if (dir.filename().empty()) dir = dir.parent_path();
  info.name = std::filesystem::absolute(dir).filename().string();
  info.architecture = loaded.config.architecture;
  info.vocab_size = loaded.config.vocab_size;
  info.num_layers = loaded.config.num_layers;
  info.kv_dtype = options.kv_dtype == KvDtype::kBf16 ? "bf16" : "f32";
  info.weight_dtype = options.weights == WeightsFormat::kInt4
                          ? "int4"
                          : model::DtypeName(loaded.weights.embed.dtype);
  info.kv_bytes_per_token = plan.kv_bytes_per_token;
  info.bos_token = loaded.config.bos;
  info.eos_tokens = loaded.config.eos_ids;
  info.has_tokenizer = tokenizer != nullptr;
  if (const auto config = tokenizer::TokenizerConfig::Load(options.model_dir); config.ok()) {
    info.chat_template = config->chat_template.value_or("");
  }
  info.device = options.device == DeviceKind::kCuda ? "cuda" : "cpu";
  info.max_context_tokens = plan.max_context_tokens;
  info.max_resident_context_tokens = static_cast<int>(
      std::min<int64_t>(plan.max_context_tokens, plan.device_kv_tokens + kBlockTokens - 1));
  info.max_sequences = options.max_sequences;
  info.max_queue = options.max_queue;
  return info;
}

class EngineImpl final : public Engine {
 public:
  explicit EngineImpl(LoadedModel loaded) : loaded_(std::move(loaded)) {}
  ~EngineImpl() override { Stop(); }

  // Takes all memory and starts the engine thread.
  absl::Status Start(EngineObserver* observer) {
    const EngineOptions& options = loaded_.sized.options;
    absl::StatusOr<std::unique_ptr<tokenizer::Tokenizer>> tokenizer =
        tokenizer::Tokenizer::Load(options.model_dir);
    if (tokenizer.ok()) {
      tokenizer_ = *std::move(tokenizer);
      WarnOfTokensWithoutRows();
    } else if (absl::IsNotFound(tokenizer.status())) {
      Log(LogLevel::kWarning, "no tokenizer; prompts and answers are token ids",
          {{"model", options.model_dir}});
    } else {
      return tokenizer.status();
    }
    model_ = DescribeModel(loaded_, tokenizer_.get());
    ASSIGN_OR_RETURN(device_, CreateDevice(options));
    if (!ProbesRegions()) RETURN_IF_ERROR(Profile({}, {}));
    const int max_tokens = std::max(options.prefill_chunk_tokens, options.max_sequences);
    ASSIGN_OR_RETURN(ops_,
                     CreateOps(*device_, model::OpsLimitsOf(loaded_.config, max_tokens), options));
    ASSIGN_OR_RETURN(weights_, model::DeviceWeights::Upload(loaded_.config, loaded_.weights, *ops_,
                                                            ExpertFormat(options)));
    ASSIGN_OR_RETURN(runner_,
                     ModelRunner::Create(loaded_.config, *weights_, *ops_, loaded_.sized.runner));
    if (ProbesRegions()) {
      const kvcache::BlockTable& blocks = runner_->cache().blocks();
      RETURN_IF_ERROR(Profile(blocks.region(kvcache::RegionKind::kSwing).memory(),
                              blocks.region(kvcache::RegionKind::kDevice).memory()));
    }
    ASSIGN_OR_RETURN(StepModel model, ModelSteps());
    share_.emplace(*model.NewTable(device::NowSeconds()),
                   roofline::ShareInterval{options.min_cpu_share, options.max_cpu_share},
                   Clock::Real());
    loop_.emplace(options, *runner_, *device_, *share_, model, observer,
                  [this](const ActiveRequest& request) { Forget(request); });
    loop_->Start();
    return absl::OkStatus();
  }

  const MemoryPlan& plan() const override { return loaded_.sized.plan; }
  const ModelInfo& model() const override { return model_; }

  absl::StatusOr<RequestId> Submit(GenerateRequest request,
                                   std::shared_ptr<GenerateSink> sink) override {
    RETURN_IF_ERROR(ValidateRequest(request, model_));
    std::vector<TokenId> prompt;
    if (auto* ids = std::get_if<std::vector<TokenId>>(&request.prompt)) {
      prompt = std::move(*ids);
    } else {
      ASSIGN_OR_RETURN(
          prompt, Tokenize(std::get<std::vector<PromptSegment>>(request.prompt), request.add_bos));
    }
    request.prompt = std::vector<TokenId>();
    RETURN_IF_ERROR(ValidatePrompt(prompt, request, model_));
    std::lock_guard lock(mutex_);
    RETURN_IF_ERROR(CheckOpen(request.request_id));
    const RequestId id = next_id_++;
    if (request.request_id.empty()) request.request_id = absl::StrCat("req-", id);
    const uint64_t seed = request.sampling.seed.value_or(seeds_());
    auto control = std::make_shared<RequestControl>();
    const std::string name = request.request_id;
    auto active = std::make_unique<ActiveRequest>(id, std::move(request), std::move(prompt), seed,
                                                  model_, tokenizer_.get(), std::move(sink),
                                                  control, Clock::Real().Now());
    in_flight_[id] = {name, control};
    by_name_[name] = id;
    if (!loop_->Post(active)) {
      in_flight_.erase(id);
      by_name_.erase(name);
      return WithReason(absl::UnavailableError("the engine has stopped"), "ENGINE_FAILED");
    }
    return id;
  }

  void Cancel(RequestId id) override {
    {
      std::lock_guard lock(mutex_);
      const auto found = in_flight_.find(id);
      if (found == in_flight_.end()) return;
      RequestControl& control = *found->second.control;
      control.Cancel(Clock::Real().Now());
    }
    loop_->Wake();
  }

  bool Abort(std::string_view request_id) override {
    {
      std::lock_guard lock(mutex_);
      const auto id = by_name_.find(std::string(request_id));
      if (id == by_name_.end()) return false;
      RequestControl& control = *in_flight_.at(id->second).control;
      control.Abort(Clock::Real().Now());
    }
    loop_->Wake();
    return true;
  }

  absl::StatusOr<std::vector<TokenId>> Tokenize(const std::vector<PromptSegment>& segments,
                                                std::optional<bool> add_bos) const override {
    RETURN_IF_ERROR(CheckTokenizer(absl::StatusCode::kInvalidArgument));
    std::vector<tokenizer::Segment> parts;
    parts.reserve(segments.size());
    for (const PromptSegment& segment : segments) {
      parts.push_back({segment.text, segment.allow_special});
    }
    absl::StatusOr<std::vector<TokenId>> ids =
        tokenizer_->Encode(parts, add_bos.value_or(tokenizer_->add_bos_by_default()));
    if (!ids.ok()) {
      const bool utf8 = absl::StrContains(ids.status().message(), "UTF-8");
      return WithReason(ids.status(), utf8 ? "INVALID_UTF8" : "INVALID_PARAMETER");
    }
    RETURN_IF_ERROR(CheckRows(*ids));
    return ids;
  }

  std::string TokenBytes(TokenId id) const override {
    return tokenizer_ == nullptr ? "" : std::string(tokenizer_->TokenBytes(id));
  }

  absl::StatusOr<std::string> Detokenize(const std::vector<TokenId>& ids,
                                         bool keep_special) const override {
    RETURN_IF_ERROR(CheckTokenizer(absl::StatusCode::kFailedPrecondition));
    for (size_t i = 0; i < ids.size(); ++i) {
      if (ids[i] >= 0 && ids[i] < model_.vocab_size) continue;
      return InvalidTokenId(ids[i], i, model_.vocab_size, "token_ids");
    }
    return tokenizer_->Decode(ids, !keep_special);
  }

  absl::StatusOr<ShareReply> SetCpuShare(const ShareUpdate& update) override {
    return share_->Offer(update);
  }
  ShareState share() const override { return share_->State(); }
  roofline::MachineProfile machine_profile() const override { return profile_; }
  absl::Status SetLinkPace(double bytes_per_s) override {
    return device_->SetLinkPace(bytes_per_s);
  }
  EngineState state() const override {
    EngineState state = loop_->state();
    // As it is now: the loop, which publishes the rest, stands still while there is no work.
    state.link_simulated = device_->link().simulated;
    state.link_pace_bytes_per_s = device_->link().pace_bytes_per_s;
    return state;
  }

  void StartDrain() override {
    std::lock_guard lock(mutex_);
    draining_ = true;
  }
  bool AwaitIdle(absl::Duration timeout) override {
    std::unique_lock lock(mutex_);
    return TimedWait(idle_, lock, timeout, [this] { return in_flight_.empty(); });
  }
  void Stop() override {
    StartDrain();
    if (loop_.has_value()) loop_->Stop();
  }
  absl::Time last_heartbeat() const override { return loop_->last_heartbeat(); }

 private:
  struct InFlight {
    std::string name;
    std::shared_ptr<RequestControl> control;
  };

  absl::Status CheckTokenizer(absl::StatusCode code) const {
    if (tokenizer_ != nullptr) return absl::OkStatus();
    return WithReason(absl::Status(code, "this checkpoint has no tokenizer"), "NO_TOKENIZER");
  }

  // Tokens added to a vocabulary after training, such as one for padding. Such a model serves all
  // other text.
  void WarnOfTokensWithoutRows() const {
    const int model_ids = loaded_.config.vocab_size;
    if (tokenizer_->vocab_size() <= model_ids) return;
    Log(LogLevel::kWarning,
        "the tokenizer has ids that the model has no embedding for; text with such a token will be "
        "refused",
        {{"tokenizer_ids", tokenizer_->vocab_size()},
         {"model_vocab_size", model_ids},
         {"first_token", std::string(tokenizer_->TokenBytes(model_ids))}});
  }

  absl::Status CheckRows(const std::vector<TokenId>& text_ids) const {
    for (size_t i = 0; i < text_ids.size(); ++i) {
      const TokenId id = text_ids[i];
      if (id < model_.vocab_size) continue;
      return InvalidTokenId(id, i, model_.vocab_size, "prompt", tokenizer_->TokenBytes(id));
    }
    return absl::OkStatus();
  }

  absl::Status CheckOpen(const std::string& request_id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (draining_) {
      return WithReason(absl::UnavailableError("the worker is shutting down"), "DRAINING");
    }
    const EngineState state = loop_->state();
    if (!state.health.ok()) {
      return WithReason(absl::UnavailableError(state.health.message()), "ENGINE_FAILED");
    }
    if (!request_id.empty() && by_name_.contains(request_id)) {
      return WithMetadata(WithReason(absl::AlreadyExistsError(absl::StrCat(
                                         "request_id '", request_id, "' is in flight")),
                                     "DUPLICATE_REQUEST_ID"),
                          "field", "request_id");
    }
    // New requests run as soon as the engine looks at them, which may be after a step, as far as it
    // has slots; but for those behind one that it had no room for.
    const int slots = state.held_requests > 0 ? state.running_requests : model_.max_sequences;
    const int64_t waiting = static_cast<int64_t>(in_flight_.size()) - slots;
    if (waiting >= model_.max_queue) {
      absl::Status status = WithReason(absl::ResourceExhaustedError(absl::StrCat(
                                           "the queue is full: ", waiting,
                                           " requests wait, at most ", model_.max_queue, " may")),
                                       "QUEUE_FULL");
      status = WithMetadata(std::move(status), "value", waiting);
      return WithMetadata(std::move(status), "limit", model_.max_queue);
    }
    return absl::OkStatus();
  }

  void Forget(const ActiveRequest& request) {
    std::lock_guard lock(mutex_);
    in_flight_.erase(request.id());
    by_name_.erase(request.request_id());
    if (in_flight_.empty()) idle_.notify_all();
  }

  RateProbeOptions ProbeOptions() const {
    return ProbeOptionsFor(loaded_.sized.options, loaded_.config,
                           loaded_.sized.plan.host_total_bytes);
  }

  // Whether rates are measured over the regions, which hold zeros yet (some percent too fast; to
  // fill them would take seconds): a little of a host's memory can be faster than all of it. (2 GiB
  // of 96 in one run: 120 GB/s of attention beside copies, and 84 over the region.) Small regions
  // lie in caches, and the budgets leave room for a probe's own memory only before everything else.
  bool ProbesRegions() const {
    const RateProbeOptions probe = ProbeOptions();
    const auto region_bytes = [&](kvcache::RegionKind kind) {
      return loaded_.sized.runner.cache.blocks[static_cast<size_t>(kind)] *
             probe.geometry.block_bytes() * loaded_.config.num_layers;
    };
    return region_bytes(kvcache::RegionKind::kSwing) >= probe.host_bytes &&
           region_bytes(kvcache::RegionKind::kDevice) >= probe.device_bytes;
  }

  absl::Status Profile(std::span<const std::byte> host, std::span<std::byte> on_device) {
    const EngineOptions& options = loaded_.sized.options;
    if (options.machine_profile.has_value()) {
      profile_ = *options.machine_profile;
      profile_.num_layers = loaded_.config.num_layers;
      return profile_.Validate();
    }
    RateProbeOptions probe = ProbeOptions();
    probe.memory = host;
    probe.device_memory = on_device;
    ASSIGN_OR_RETURN(profile_, ProbeRates(*device_, probe));
    profile_.host_budget_bytes = options.host_budget_bytes;
    profile_.num_layers = loaded_.config.num_layers;
    Log(LogLevel::kInfo, "rates probed, bytes per second",
        {{"cpu_alone", profile_.rates.cpu_alone},
         {"cpu_with_link", profile_.rates.cpu_with_link},
         {"link_alone", profile_.rates.link_alone},
         {"link_with_cpu", profile_.rates.link_with_cpu},
         {"cpu_workers", options.cpu_workers},
         {"isa", std::string(CpuIsaName(ActiveCpuIsa()))}});
    return absl::OkStatus();
  }

  // What is in force without a controller comes from this: the start-up rates, and dense times, at
  // first of steps that are run here.
  absl::StatusOr<StepModel> ModelSteps() {
    StepModel model(
        {.rates = profile_.rates,
         .handoff_seconds = profile_.handoff_per_layer_seconds * loaded_.config.num_layers,
         .num_layers = loaded_.config.num_layers,
         .ring_bytes = loaded_.sized.options.ring_bytes,
         .device_kv_bytes = KvBytesOnDevice(),
         .host_kv_bytes = loaded_.sized.plan.host_total_bytes});
    const int max_batch = loaded_.sized.options.max_sequences;
    RETURN_IF_ERROR(runner_->MeasureDense(1).status());  // The first step touches all weights.
    for (int batch = 1;; batch = std::min(4 * batch, max_batch)) {
      ASSIGN_OR_RETURN(const double seconds, runner_->MeasureDense(batch));
      model.LearnDense(batch, seconds);
      if (batch == max_batch) return model;
    }
  }
  int64_t KvBytesOnDevice() const {
    return loaded_.sized.plan.device_kv_tokens * loaded_.sized.plan.kv_bytes_per_token;
  }

  LoadedModel loaded_;
  ModelInfo model_;
  roofline::MachineProfile profile_;
  std::unique_ptr<tokenizer::Tokenizer> tokenizer_;
  // In the order of use: each needs those before it.
  std::unique_ptr<device::Device> device_;
  std::unique_ptr<ops::Ops> ops_;
  std::unique_ptr<model::DeviceWeights> weights_;
  std::unique_ptr<ModelRunner> runner_;
  mutable std::optional<CpuShareSlot> share_;
  std::optional<StepLoop> loop_;

  std::mutex mutex_;
  std::condition_variable idle_;  // in_flight_ has become empty
  RequestId next_id_ ABSL_GUARDED_BY(mutex_) = 1;
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  absl::flat_hash_map<RequestId, InFlight> in_flight_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<std::string, RequestId> by_name_ ABSL_GUARDED_BY(mutex_);
  std::mt19937_64 seeds_ ABSL_GUARDED_BY(mutex_){std::random_device{}()};
};

}  // namespace

absl::StatusOr<MemoryPlan> Engine::Plan(const EngineOptions& options) {
  ASSIGN_OR_RETURN(const LoadedModel loaded, LoadAndPlan(options));
  return loaded.sized.plan;
}

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(const EngineOptions& options,
                                                       EngineObserver* observer) {
  ASSIGN_OR_RETURN(LoadedModel loaded, LoadAndPlan(options));
  // Not in Plan: that may be of a larger machine.
  RETURN_IF_ERROR(CheckFitsMachine(loaded.sized.plan, options.device, UsableHostMemoryBytes()));
  auto engine = std::make_unique<EngineImpl>(std::move(loaded));
  RETURN_IF_ERROR(engine->Start(observer));
  return engine;
}

}  // namespace writescope::runtime
