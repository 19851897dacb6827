// writescope plan: what a machine would do with a model, from two files and no GPU.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/cli/model_shape.h"

namespace writescope::cli {

struct PlanFlags {
  std::string model_dir;  // A folder with config.json.
  std::string profile;    // A machine profile.
  int batch_size = 1;
  std::vector<int64_t> context_tokens;  // Of each sequence; empty: some up to the model's limit.
  int64_t vram_budget_bytes = 0;        // 0: the profile's.
  int64_t host_budget_bytes = 0;
  KvDtype kv_dtype = KvDtype::kBf16;
  WeightFormat weights = WeightFormat::kBf16;
};

// Several lines: memory, and a table of contexts.
absl::StatusOr<std::string> FormatPlan(const PlanFlags& flags);
int RunPlan(const PlanFlags& flags);

}  // namespace writescope::cli
