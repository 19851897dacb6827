// The chat templates of the model families that are built in, and how a checkpoint's own is
// recognised as one of them.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace writescope::tokenizer {

enum class ChatFamily {
  kChatMl,         // Qwen3: <|im_start|>role ... <|im_end|>
  kDeepSeekV2,     // User: ... Assistant: ...
  kMixtral,        // [INST] directly behind BOS, answers directly behind [/INST]
  kMixtralSpaced,  // A space in front of both, and a system message
};

struct KnownChatTemplate {
  ChatFamily family = ChatFamily::kChatMl;
  // ChatML only.
  bool reasons = false;  // Reasoning in earlier answers is treated specially.
  std::string generation_prompt;
  std::string no_thinking_prompt;  // Follows the generation prompt if thinking is off.
  // Mixtral only.
  std::string behind_eos;  // One revision puts a space behind each answer's EOS.
};

// A template is known if what of it runs without tools is, statement for statement, what runs of a
// known one. Unimplemented, naming the first statement that differs, for all others;
// InvalidArgument for a text that is no template.
absl::StatusOr<KnownChatTemplate> RecogniseChatTemplate(std::string_view jinja);

}  // namespace writescope::tokenizer
