// Cuts normalised text into the words that are encoded one by one.
#pragma once

#include <deque>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/tokenizer/text_pattern.h"
#include "nlohmann/json_fwd.hpp"

namespace writescope::tokenizer {

// Thread-safe: never changes after it is made.
class PreTokenizer {
 public:
  struct Scratch {
    TextPattern::Scratch pattern;
    std::vector<TextPattern::Match> matches;
    std::vector<std::string_view> next;
  };

  // From the "pre_tokenizer" of tokenizer.json, null included (one word): Split, Digits, ByteLevel,
  // Metaspace, Sequence. Another kind is Unimplemented and named.
  static absl::StatusOr<PreTokenizer> FromJson(const nlohmann::json& spec);

  // One word, whatever the text.
  PreTokenizer() = default;

  // Sets *words to the words of `text`, which must outlive them. Text that a step changes is kept
  // in *storage. `at_text_start`: nothing precedes in the whole input.
  void Split(std::string_view text, bool at_text_start, Scratch* scratch,
             std::deque<std::string>* storage, std::vector<std::string_view>* words) const;

  // Whether words are spelled by their bytes.
  bool byte_level() const { return byte_level_; }

 private:
  enum class Behavior { kRemoved, kIsolated, kMergedWithPrevious, kMergedWithNext, kContiguous };
  struct SplitStep {
    TextPattern pattern;
    Behavior behavior;
    bool invert;
  };
  // Puts a space (or its spelling) in front of words that lack it, and respells spaces.
  struct PrefixStep {
    enum class Where { kNever, kFirst, kAlways };
    std::string space;
    Where where;
  };

  absl::Status AddSteps(const nlohmann::json& spec, std::string_view where, int depth);
  absl::Status AddSplit(const nlohmann::json& spec, std::string_view where);
  absl::Status AddByteLevel(const nlohmann::json& spec, std::string_view where);
  absl::Status AddMetaspace(const nlohmann::json& spec, std::string_view where);
  static void ApplySplit(const SplitStep& step, std::string_view text, Scratch* scratch,
                         std::vector<std::string_view>* words);

  std::vector<std::variant<SplitStep, PrefixStep>> steps_;
  bool byte_level_ = false;
};

}  // namespace writescope::tokenizer
