#include "tests/bench/engine_bench/bench_rig.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <random>
#include <span>
#include <thread>

#include "engine/base/bf16.h"
#include "engine/base/cpu_features.h"
#include "engine/base/status_macros.h"
#include "engine/base/units.h"
#include "engine/model/weights.h"
#include "engine/runtime/accelerator.h"
#include "engine/runtime/rate_probe.h"
#include "engine/runtime/resident_pacer.h"
#include "tests/bench/raw_read.h"

#if WRITESCOPE_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace writescope::bench {
namespace {

// Keys and values repeat with this period; pages do not.
constexpr int64_t kPatternBytes = 8 * kMiB;

std::vector<std::byte> RandomValues(KvDtype dtype) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 0.5F);
  std::vector<std::byte> bytes(kPatternBytes);
  const size_t size = static_cast<size_t>(KvDtypeBytes(dtype));
  for (size_t at = 0; at < bytes.size(); at += size) {
    const float value = normal(random);
    const uint16_t half = FloatToBf16(value);
    std::memcpy(&bytes[at], dtype == KvDtype::kBf16 ? static_cast<const void*>(&half) : &value,
                size);
  }
  return bytes;
}

void FillHost(std::span<std::byte> memory, std::span<const std::byte> pattern) {
  const size_t pieces = (memory.size() + pattern.size() - 1) / pattern.size();
  const size_t num_threads = static_cast<size_t>(std::max(1, UsableCores()));
  std::vector<std::thread> threads;
  for (size_t t = 0; t < num_threads; ++t) {
    threads.emplace_back([=] {
      for (size_t piece = t; piece < pieces; piece += num_threads) {
        const size_t at = piece * pattern.size();
        std::memcpy(memory.data() + at, pattern.data(),
                    std::min(pattern.size(), memory.size() - at));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// What was read goes somewhere, or the compiler would leave the reading out.
volatile uint64_t read_sum;

void ReadPlainly(const std::byte* data, int64_t size_bytes) {
  const auto read = DetectedCpuIsa() >= CpuIsa::kAvx512 ? RawReadAvx512 : RawReadPlain;
  read_sum = read(data, size_bytes);
}

ops::WeightFormat ExpertFormat(const runtime::EngineOptions& options) {
  return options.weights == runtime::WeightsFormat::kInt4 ? ops::WeightFormat::kInt4
                                                          : ops::WeightFormat::kSource;
}

}  // namespace

absl::StatusOr<std::unique_ptr<BenchRig>> BenchRig::Create(const runtime::EngineOptions& given) {
  std::unique_ptr<BenchRig> rig(new BenchRig());
  RETURN_IF_ERROR(runtime::ValidateOptions(given));
  RETURN_IF_ERROR(runtime::CheckAccelerator(given));
  ASSIGN_OR_RETURN(rig->config_, model::ReadModelConfig(given.model_dir));
  ASSIGN_OR_RETURN(model::ModelWeights weights,
                   given.load_format == runtime::LoadFormat::kDummy
                       ? model::DummyWeights(rig->config_)
                       : model::LoadWeights(given.model_dir, rig->config_));
  const ops::OpsFootprint footprint = runtime::AcceleratorFootprint(given);
  ASSIGN_OR_RETURN(rig->sized_, runtime::PlanEngineMemory(
                                    given, rig->config_,
                                    model::DeviceWeights::Bytes(rig->config_, weights, footprint,
                                                                ExpertFormat(given)),
                                    footprint));
  const runtime::EngineOptions& options = rig->sized_.options;
  rig->probe_ = runtime::ProbeOptionsFor(options, rig->config_, rig->sized_.plan.host_total_bytes);
  // The plan takes all of its budget; MeasureRates copies to a place beside it.
  runtime::EngineOptions with_probe = options;
  with_probe.vram_budget_bytes += rig->probe_.device_bytes;
  ASSIGN_OR_RETURN(rig->device_, runtime::CreateDevice(with_probe));
  ASSIGN_OR_RETURN(rig->profile_, runtime::ProbeRates(*rig->device_, rig->probe_));
  runtime::RateProbeOptions probe = rig->probe_;
  probe.read = &ReadPlainly;
  ASSIGN_OR_RETURN(const roofline::MachineProfile raw, runtime::ProbeRates(*rig->device_, probe));
  rig->raw_rates_ = raw.rates;
  const int max_tokens = std::max(options.prefill_chunk_tokens, options.max_sequences);
  ASSIGN_OR_RETURN(
      rig->ops_,
      runtime::CreateOps(*rig->device_, model::OpsLimitsOf(rig->config_, max_tokens), options));
  ASSIGN_OR_RETURN(rig->weights_, model::DeviceWeights::Upload(rig->config_, weights, *rig->ops_,
                                                               ExpertFormat(given)));
  ASSIGN_OR_RETURN(rig->runner_, runtime::ModelRunner::Create(rig->config_, *rig->weights_,
                                                              *rig->ops_, rig->sized_.runner));
  return rig;
}

BenchRig::~BenchRig() {
  if (runner_ != nullptr && runner_->Ok()) RemoveAll();
}

absl::StatusOr<BenchRig::MeasuredRates> BenchRig::MeasureRates() {
  runtime::RateProbeOptions probe = probe_;
  const std::span<std::byte> swing = cache().blocks().region(kvcache::RegionKind::kSwing).memory();
  if (static_cast<int64_t>(swing.size()) < probe.host_bytes) {
    return MeasuredRates{profile_.rates, raw_rates_};
  }
  probe.memory = swing;
  ASSIGN_OR_RETURN(const roofline::MachineProfile kernels, runtime::ProbeRates(*device_, probe));
  probe.read = &ReadPlainly;
  ASSIGN_OR_RETURN(const roofline::MachineProfile raw, runtime::ProbeRates(*device_, probe));
  return MeasuredRates{kernels.rates, raw.rates};
}

int64_t BenchRig::DeviceBytesInUse() const {
#if WRITESCOPE_WITH_CUDA
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  if (sized_.options.device == runtime::DeviceKind::kCuda &&
      cudaMemGetInfo(&free_bytes, &total_bytes) == cudaSuccess) {
    return static_cast<int64_t>(total_bytes - free_bytes);
  }
#endif
  return device_->device_used_bytes();
}

int64_t BenchRig::PeakHostBytes() const {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmHWM:")) return std::stoll(line.substr(6)) * kKiB;
  }
  return 0;
}

absl::Status BenchRig::FillRegions() {
  const std::vector<std::byte> pattern = RandomValues(sized_.options.kv_dtype);
  for (const kvcache::RegionKind kind : kvcache::kAllRegions) {
    if (cache().blocks().region(kind).num_blocks() == 0) continue;
    const std::span<std::byte> memory = cache().blocks().region(kind).memory();
    if (kvcache::IsSpilled(kind)) {
      FillHost(memory, pattern);
      continue;
    }
    for (size_t at = 0; at < memory.size(); at += pattern.size()) {
      device_->upload().Copy(memory.data() + at, pattern.data(),
                             static_cast<int64_t>(std::min(pattern.size(), memory.size() - at)));
    }
  }
  return device_->upload().Record().Wait(absl::Minutes(2));
}

absl::Status BenchRig::AddFilled(int batch, int64_t context, int64_t more_blocks) {
  const int64_t chunk = sized_.options.prefill_chunk_tokens;
  for (int i = 0; i < batch; ++i) {
    const int slot = cache().AddSequence(CeilDiv(context, kBlockTokens) + more_blocks);
    if (slot < 0) return absl::ResourceExhaustedError("no slot for another sequence");
    slots_.push_back(slot);
    // Whole blocks only: the open tail begins with the first decoded token.
    for (int64_t done = 0; done < context / kBlockTokens * kBlockTokens;) {
      const int64_t count = std::min(chunk, context / kBlockTokens * kBlockTokens - done);
      RETURN_IF_ERROR(cache().AwaitCommits(slot));
      int workspace_used = 0;
      ASSIGN_OR_RETURN(const kvcache::WritePlan plan,
                       cache().PrepareWrite(slot, static_cast<int>(count), &workspace_used));
      // Nothing is computed and nothing copied: the blocks hold their fill.
      for (const kvcache::UnitWrite& write : plan.units) {
        for (int layer = 0; layer < config_.num_layers; ++layer) {
          cache().mutable_blocks().CountWrite(write.block_id, layer);
        }
      }
      cache().FinishWrite(plan, std::vector<TokenId>(static_cast<size_t>(count), i + 1));
      done += count;
    }
    RETURN_IF_ERROR(cache().AwaitCommits(slot));
  }
  ChooseTokens();
  return absl::OkStatus();
}

absl::Status BenchRig::Append(int slot, int64_t num_tokens, PrefillTiming* timing) {
  std::mt19937 random(static_cast<unsigned>(slot) + 1);
  std::uniform_int_distribution<TokenId> any(0, config_.vocab_size - 1);
  std::vector<TokenId> tokens(static_cast<size_t>(num_tokens));
  for (TokenId& token : tokens) token = any(random);
  const size_t chunk = static_cast<size_t>(sized_.options.prefill_chunk_tokens);
  for (size_t first = 0; first < tokens.size(); first += chunk) {
    const size_t count = std::min(chunk, tokens.size() - first);
    const bool last = first + count == tokens.size();
    const runtime::StepSlice slice{
        .slot = slot,
        .tokens = std::span(tokens).subspan(first, count),
        .logits = last ? runtime::LogitsOf::kLast : runtime::LogitsOf::kNone};
    int full_slice = -1;
    ASSIGN_OR_RETURN(
        const runtime::StepResult result,
        runner_->Run(
            {&slice, 1}, {}, [](int, int64_t, const runtime::RowLogits&) {}, &full_slice));
    timing->attention_s += result.attention.device_attention_s;
    timing->dense_s += result.attention.dense_s;
    timing->link_wait_s += result.attention.link_wait_s;
    timing->link_busy_s += result.attention.link_busy_s;
    timing->link_bytes += result.attention.link_bytes;
  }
  return absl::OkStatus();
}

absl::StatusOr<PrefillTiming> BenchRig::AddByPrefill(int batch, int64_t context) {
  PrefillTiming timing;
  const double began_s = device::NowSeconds();
  for (int i = 0; i < batch; ++i) {
    const int slot = cache().AddSequence(CeilDiv(context, kBlockTokens) + 1);
    if (slot < 0) return absl::ResourceExhaustedError("no slot for another sequence");
    slots_.push_back(slot);
    RETURN_IF_ERROR(Append(slot, context, &timing));
  }
  ChooseTokens();
  timing.seconds = device::NowSeconds() - began_s;
  return timing;
}

void BenchRig::ChooseTokens() {
  next_tokens_.resize(slots_.size());
  for (size_t i = 0; i < slots_.size(); ++i) {
    next_tokens_[i] =
        static_cast<TokenId>(int64_t{7919} * (static_cast<int64_t>(i) + 1) % config_.vocab_size);
  }
}

void BenchRig::RemoveAll() {
  for (const int slot : slots_) cache().RemoveSequence(slot);
  slots_.clear();
  next_tokens_.clear();
}

void BenchRig::RemoveFirst() {
  cache().RemoveSequence(slots_.front());
  slots_.erase(slots_.begin());
  next_tokens_.erase(next_tokens_.begin());
}

void BenchRig::MoveLastToFront() {
  std::rotate(slots_.begin(), slots_.end() - 1, slots_.end());
  std::rotate(next_tokens_.begin(), next_tokens_.end() - 1, next_tokens_.end());
}

absl::StatusOr<StepTiming> BenchRig::Step(size_t first, size_t count,
                                          const runtime::StepOptions& options, bool may_replay) {
  const std::vector<TokenId> tokens = next_tokens_;
  std::vector<runtime::StepSlice> slices;
  std::vector<int> slots;
  for (size_t i = first; i < first + count; ++i) {
    slots.push_back(slots_[i]);
    slices.push_back(
        {.slot = slots_[i], .tokens = std::span(tokens).subspan(i, 1), .only_largest = true});
  }
  const auto sample = [&](int slice, int64_t, const runtime::RowLogits& logits) {
    next_tokens_[first + static_cast<size_t>(slice)] = logits.largest.index;
  };
  StepTiming timing;
  int full_slice = -1;
  const double began_s = device::NowSeconds();
  if (runner_->SpilledBytes(slots) == 0) {
    RETURN_IF_ERROR(runner_->RunResident(slices, sample, &full_slice, may_replay));
  } else {
    ASSIGN_OR_RETURN(const runtime::StepResult result,
                     runner_->Run(slices, options, sample, &full_slice));
    timing.attention = result.attention;
    timing.micro_batches = result.micro_batches;
  }
  timing.step_s = device::NowSeconds() - began_s;
  return timing;
}

absl::StatusOr<StepTiming> BenchRig::Decode(const attention::SharePlan& share, bool retain,
                                            bool may_replay, int micro_batches) {
  runtime::StepOptions options{.share = share, .retain_keep_free = retain ? 0 : -1};
  if (micro_batches == 2) options.micro_batches = runner_->SplitInTwo(slots_);
  return Step(0, slots_.size(), options, may_replay);
}

runtime::StepPlanner BenchRig::Planner(runtime::CutMode cut, const roofline::Rates& rates,
                                       double dense_s) const {
  runtime::StepModel model(
      {.rates = rates,
       .handoff_seconds = profile_.handoff_per_layer_seconds * config_.num_layers,
       .num_layers = config_.num_layers,
       .ring_bytes = sized_.options.ring_bytes});
  model.LearnDense(batch(), dense_s);
  return {{.cut = cut}, std::move(model)};
}

absl::StatusOr<StepTiming> BenchRig::DecodePlanned(runtime::StepPlanner& planner, double cpu_share,
                                                   bool retain) {
  runtime::StepPlanner::Plan plan =
      planner.PlanStep(*runner_, slots_, runner_->BytesOf(slots_), {.cpu_share = cpu_share});
  ASSIGN_OR_RETURN(StepTiming timing, Step(0, slots_.size(),
                                           {.share = plan.share,
                                            .retain_keep_free = retain ? 0 : -1,
                                            .micro_batches = std::move(plan.micro_batches)}));
  planner.Learn({.batch_size = batch(),
                 .micro_batches = timing.micro_batches,
                 .predicted_seconds = plan.predicted_seconds,
                 .seconds = timing.step_s},
                timing.attention, device::NowSeconds());
  return timing;
}

absl::StatusOr<StepTiming> BenchRig::DecodeFrom(int first, const attention::SharePlan& share) {
  return Step(static_cast<size_t>(first), slots_.size() - static_cast<size_t>(first),
              {.share = share});
}

absl::StatusOr<BenchRig::BesideTiming> BenchRig::DecodeBeside(const attention::SharePlan& share) {
  BesideTiming beside;
  absl::Status first_status;
  runtime::ResidentPacer pacer(device::NowSeconds());
  runtime::StepOptions options{.share = share};
  options.between = [&](const std::function<bool()>& still_waiting) {
    while (still_waiting()) {
      if (!first_status.ok() || !pacer.MayStep(device::NowSeconds())) {
        absl::SleepFor(absl::Microseconds(20));
        continue;
      }
      const absl::StatusOr<StepTiming> timing =
          runner_->IsResident(slots_[0]) ? Step(0, 1, {})
                                         : absl::InternalError("the first sequence has spilled");
      first_status = timing.status();
      if (timing.ok()) pacer.AddStep(timing->step_s);
    }
  };
  ASSIGN_OR_RETURN(beside.step, Step(1, slots_.size() - 1, options));
  RETURN_IF_ERROR(first_status);
  beside.first_s = pacer.spent_s();
  beside.first_steps = pacer.num_steps();
  return beside;
}

}  // namespace writescope::bench
