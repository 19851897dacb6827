#include "engine/runtime/scheduler.h"

#include <algorithm>

namespace writescope::runtime {

StepChoice ChooseStep(std::span<const SchedulableSequence> running, int64_t chunk_tokens,
                      bool prefill_is_over) {
  StepChoice prefill{.kind = StepChoice::Kind::kPrefill, .parts = {}};
  StepChoice decode{.kind = StepChoice::Kind::kDecode, .parts = {}};
  int64_t left = chunk_tokens;
  for (size_t i = 0; i < running.size(); ++i) {
    const int64_t pending = running[i].pending;
    if (pending == 1) {
      decode.parts.push_back({i, 1});
    } else if (pending > 1 && left > 0) {
      const int64_t take = std::min(pending, left);
      prefill.parts.push_back({i, take});
      left -= take;
    }
  }
  if (!prefill.parts.empty() && (decode.parts.empty() || !prefill_is_over)) return prefill;
  if (!decode.parts.empty()) return decode;
  return {};
}

}  // namespace writescope::runtime
