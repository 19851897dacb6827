// What counts as a sane size in a config.json. The limits are far above any published model, and
// low enough that every width made from two of them (heads x head_dim, shared experts x width) fits
// in an int and every matrix in an int64_t.
#pragma once

#include "engine/model/json_reader.h"

namespace writescope::model {

inline constexpr IntRange kLayersRange{1, 4096};
inline constexpr IntRange kHeadsRange{1, 1 << 14};
inline constexpr IntRange kHeadDimRange{1, 1 << 14};
inline constexpr IntRange kWidthRange{1, 1 << 24};
inline constexpr IntRange kVocabRange{1, 1 << 24};
inline constexpr IntRange kExpertsRange{1, 1 << 14};
inline constexpr IntRange kSharedExpertsRange{0, 64};
inline constexpr IntRange kPositionsRange{1, 1'000'000'000};
// Routed experts of all layers: bounds the table of tensors.
inline constexpr int64_t kMaxExpertsInModel = int64_t{1} << 18;
inline constexpr double kMaxParameters = 1e15;

}  // namespace writescope::model
