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

// Whose turn it is while there are both prompts to read and sequences to decode: after a decode
// step prompts get a chunk, and more until they have had as much time as the step took. So a long
// prompt lengthens the time between two tokens of others by that time and a chunk at most, and slow
// decode steps do not starve the prompts behind them.
class StepTurns {
 public:
  void DecodeTook(double seconds) {
    decode_s_ = seconds;
    prefill_s_ = 0;
    had_chunk_ = false;
  }
  void PrefillTook(double seconds) {
    prefill_s_ += seconds;
    had_chunk_ = true;
  }
  bool prefill_is_over() const { return had_chunk_ && prefill_s_ >= decode_s_; }

 private:
  double decode_s_ = 0;
  double prefill_s_ = 0;
  bool had_chunk_ = false;
};

// Sequences come in order of arrival. A chunk's tokens go to the oldest prompt first, and what is
// left of it to the next ones.
StepChoice ChooseStep(std::span<const SchedulableSequence> running, int64_t chunk_tokens,
                      bool prefill_is_over);

}  // namespace writescope::runtime
