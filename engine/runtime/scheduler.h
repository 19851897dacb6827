// Pure: which work the next step does.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace writescope::runtime {

// A running sequence: `pending` of its tokens are not in the cache yet. One is a decode step; more
// are a prompt (or a dropped sequence) being read.
struct SchedulableSequence {
  int64_t pending = 0;
};

struct StepChoice {
  enum class Kind { kIdle, kPrefill, kDecode };
  struct Part {
    size_t index = 0;  // Into the sequences given
    int64_t num_tokens = 0;
  };
  Kind kind = Kind::kIdle;
  std::vector<Part> parts;
};

// Sequences come in order of arrival. Prompt chunks and decode steps take turns while there are
// both, so that a long prompt stops nobody's text; a chunk's tokens go to the oldest prompt first,
// and what is left of it to the next ones.
StepChoice ChooseStep(std::span<const SchedulableSequence> running, int64_t chunk_tokens,
                      bool last_was_prefill);

}  // namespace writescope::runtime
