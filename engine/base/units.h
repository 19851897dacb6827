// Small types for quantities that must not be mixed up, and sizes by name.
#pragma once

#include <cstdint>

namespace writescope {

inline constexpr int64_t kKiB = int64_t{1} << 10;
inline constexpr int64_t kMiB = int64_t{1} << 20;
inline constexpr int64_t kGiB = int64_t{1} << 30;

// A request inside the engine; made by the engine, never reused within a process.
using RequestId = int64_t;
// A token of the model's vocabulary.
using TokenId = int32_t;

constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t RoundUp(int64_t a, int64_t multiple) { return CeilDiv(a, multiple) * multiple; }

}  // namespace writescope
