// A model's bytes, counted from its config.json alone: for plans without a checkpoint.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "engine/base/tile_layout.h"
#include "engine/model/config.h"
#include "engine/roofline/plan.h"

namespace writescope::cli {

enum class WeightFormat {
  kBf16,
  kInt4,  // Experts in 4 bits with a bf16 scale for each 128 values of a row; the rest in bf16.
};

struct ParameterCount {
  int64_t experts = 0;  // Of routed experts.
  int64_t rest = 0;
};
ParameterCount CountParameters(const model::ModelConfig& config);

roofline::ModelShape ShapeOf(const model::ModelConfig& config, const std::string& name,
                             KvDtype kv_dtype, WeightFormat weights);

}  // namespace writescope::cli
