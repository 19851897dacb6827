// Chat templates of the known model families, built in and matched to the checkpoint's own.
//
// A checkpoint brings its template as a Jinja program. It is not run: what it can print is compared
// with what the known templates print, and a template that prints anything else is refused. A
// wrong template makes a model worse without any error, so there is no fallback.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/tokenizer/tokenizer.h"

namespace writescope::tokenizer {

enum class ChatRole { kSystem, kUser, kAssistant };

struct ChatMessage {
  ChatRole role = ChatRole::kUser;
  std::string content;
};

struct ChatOptions {
  bool add_generation_prompt = true;
  // False asks a model that can do both to answer without reasoning. Others ignore it.
  bool enable_thinking = true;
};

// Thread-safe: never changes after it is made.
class ChatTemplate {
 public:
  // Reads chat_template.jinja or else tokenizer_config.json in the folder. NotFound if there is no
  // template; Unimplemented if it is none that is known.
  static absl::StatusOr<ChatTemplate> Load(const std::string& model_dir);

  // The same for a template's text and the BOS and EOS that it may print.
  static absl::StatusOr<ChatTemplate> Match(std::string_view jinja, std::string bos_token,
                                            std::string eos_token);

  // The prompt, its BOS included where the template has one: encode it with add_bos = false. Only
  // the template's own text is marked allow_special. InvalidArgument for an order of roles that
  // the template refuses.
  absl::StatusOr<std::vector<Segment>> Render(std::span<const ChatMessage> messages,
                                              const ChatOptions& options) const;

  // For people: "ChatML (Qwen3)".
  std::string_view name() const;

 private:
  enum class Family {
    kChatMl,         // Qwen3: <|im_start|>role ... <|im_end|>
    kDeepSeekV2,     // User: ... Assistant: ...
    kMixtral,        // [INST] directly behind BOS, answers directly behind [/INST]
    kMixtralSpaced,  // A space in front of both, and a system message
  };

  ChatTemplate(Family family, std::string bos_token, std::string eos_token)
      : family_(family), bos_token_(std::move(bos_token)), eos_token_(std::move(eos_token)) {}

  void RenderChatMl(std::span<const ChatMessage> messages, const ChatOptions& options,
                    std::vector<Segment>* out) const;
  void RenderDeepSeekV2(std::span<const ChatMessage> messages, const ChatOptions& options,
                        std::vector<Segment>* out) const;
  absl::Status RenderMixtral(std::span<const ChatMessage> messages,
                             std::vector<Segment>* out) const;

  Family family_;
  std::string bos_token_;
  std::string eos_token_;
  // ChatML only.
  bool reasons_ = false;  // Reasoning in earlier answers is treated specially.
  std::string generation_prompt_;
  std::string no_thinking_prompt_;  // Follows the generation prompt if thinking is off.
  // Mixtral only.
  std::string behind_eos_;  // One revision puts a space behind each answer's EOS.
};

}  // namespace writescope::tokenizer
