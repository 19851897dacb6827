#include "server/cli/plan.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/base/status_macros.h"
#include "server/cli/client.h"
#include "server/parse_units.h"

namespace writescope::cli {
namespace {

using roofline::DecodePlan;
using roofline::DecodeRequest;
using roofline::MachineProfile;
using roofline::ModelShape;

std::string Bytes(int64_t bytes) { return server::FormatByteSize(static_cast<double>(bytes)); }

std::string FolderName(const std::string& dir) {
  std::filesystem::path path(dir);
  if (!path.has_filename()) path = path.parent_path();
  return path.filename().string();
}

std::string MemoryText(const ModelShape& shape, const MachineProfile& profile,
                       const roofline::MemoryPlan& memory) {
  std::string text =
      absl::StrFormat("model      %s: %d layers, %s of weights, %s of kv a token\n", shape.name,
                      shape.num_layers, Bytes(shape.weight_bytes), Bytes(shape.kv_bytes_per_token));
  absl::StrAppendFormat(&text, "machine    %s%s\n", profile.name,
                        profile.measured ? "" : " (not measured: estimates)");
  absl::StrAppendFormat(
      &text, "device     %s: weights %s, workspace %s, ring %s, tails %s, kv %s\n",
      Bytes(memory.device_budget_bytes), Bytes(memory.weight_bytes), Bytes(memory.workspace_bytes),
      Bytes(memory.ring_bytes), Bytes(memory.tail_bytes), Bytes(memory.device_kv_bytes));
  absl::StrAppendFormat(
      &text, "host       %s\n",
      memory.host_budget_bytes > 0 ? Bytes(memory.host_budget_bytes) : "no limit known");
  absl::StrAppendFormat(&text, "tokens     %d resident in all", memory.max_resident_tokens);
  if (memory.max_context_tokens > 0) {
    absl::StrAppendFormat(&text, "; at most %d of context a sequence", memory.max_context_tokens);
  }
  return text + "\n";
}

std::string RowText(int64_t context_tokens, int64_t model_tokens, const DecodePlan& plan) {
  const auto tokens_per_s = [&plan](double step_seconds) {
    return step_seconds > 0 ? plan.tokens_per_second * plan.step_seconds / step_seconds : 0;
  };
  const std::string too_long =
      context_tokens > model_tokens ? absl::StrCat("  above the model's ", model_tokens) : "";
  return absl::StrFormat("%9d  %10s  %5.3f  %8.1f ms  %8.1f  %8.1f  %8.1f  %5.2fx%s%s\n",
                         context_tokens, Bytes(plan.memory.spilled_kv_bytes), plan.share,
                         plan.step_seconds * 1e3, plan.tokens_per_second,
                         tokens_per_s(plan.stream_step_seconds),
                         tokens_per_s(plan.cpu_step_seconds),
                         plan.step_seconds > 0 ? plan.stream_step_seconds / plan.step_seconds : 0,
                         plan.memory.fits_host ? "" : "  does not fit the host", too_long);
}

// What a worker takes beside weights and KV where it is told nothing else. Budgets of a few GiB are
// those of the CPU device, which has no context of a GPU's libraries in its memory.
void SizeFixedParts(const ModelShape& shape, const MachineProfile& profile,
                    DecodeRequest* request) {
  constexpr int64_t kWorkspaceDivisor = 8;
  constexpr int64_t kRingDivisor = 8;
  const int64_t budget = profile.device_budget_bytes;
  request->workspace_bytes = std::min(request->workspace_bytes, budget / kWorkspaceDivisor);
  const int64_t room = budget - shape.weight_bytes - request->workspace_bytes;
  request->ring_bytes = std::min(request->ring_bytes, std::max<int64_t>(room, 0) / kRingDivisor);
}

std::vector<int64_t> DefaultContexts(int64_t limit) {
  std::vector<int64_t> contexts;
  for (int64_t context = 8192; context < limit; context *= 4) contexts.push_back(context);
  contexts.push_back(limit);
  return contexts;
}

}  // namespace

absl::StatusOr<std::string> FormatPlan(const PlanFlags& flags) {
  ASSIGN_OR_RETURN(const model::ModelConfig config, model::ReadModelConfig(flags.model_dir));
  ASSIGN_OR_RETURN(MachineProfile profile, roofline::ReadMachineProfile(flags.profile));
  if (flags.vram_budget_bytes > 0) profile.device_budget_bytes = flags.vram_budget_bytes;
  if (flags.host_budget_bytes > 0) profile.host_budget_bytes = flags.host_budget_bytes;
  const ModelShape shape =
      ShapeOf(config, FolderName(flags.model_dir), flags.kv_dtype, flags.weights);
  const std::vector<int64_t> contexts = flags.context_tokens.empty()
                                            ? DefaultContexts(config.max_position_embeddings)
                                            : flags.context_tokens;
  std::string text;
  for (const int64_t context : contexts) {
    DecodeRequest request;
    request.batch_size = flags.batch_size;
    request.context_tokens = context;
    SizeFixedParts(shape, profile, &request);
    ASSIGN_OR_RETURN(const DecodePlan plan, roofline::PlanDecode(shape, profile, request));
    if (text.empty()) {
      text = absl::StrCat(MemoryText(shape, profile, plan.memory), "\nprediction for a batch of ",
                          flags.batch_size, " (share: the CPU's part of the spilled bytes)\n",
                          "  context     spilled  share         step   tokens/s    stream       "
                          "cpu  against stream\n");
    }
    absl::StrAppend(&text, RowText(context, config.max_position_embeddings, plan));
  }
  return text;
}

int RunPlan(const PlanFlags& flags) {
  const absl::StatusOr<std::string> text = FormatPlan(flags);
  if (!text.ok()) return ReportLocalError(std::string(text.status().message()));
  std::fputs(text->c_str(), stdout);
  return kExitOk;
}

}  // namespace writescope::cli
