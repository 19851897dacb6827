// Chat templates of the known model families, built in and matched to the checkpoint's own.
//
// A checkpoint brings its template as a Jinja program. It is not run: its statements are compared
// with those of the known templates, and a template with any other statement is refused. A wrong
// template makes a model worse without any error, so there is no fallback.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/tokenizer/known_chat_templates.h"
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
  ChatTemplate(KnownChatTemplate known, std::string bos_token, std::string eos_token)
      : known_(std::move(known)),
        bos_token_(std::move(bos_token)),
        eos_token_(std::move(eos_token)) {}

  void RenderChatMl(std::span<const ChatMessage> messages, const ChatOptions& options,
                    std::vector<Segment>* out) const;
  void RenderDeepSeekV2(std::span<const ChatMessage> messages, const ChatOptions& options,
                        std::vector<Segment>* out) const;
  absl::Status RenderMixtral(std::span<const ChatMessage> messages,
                             std::vector<Segment>* out) const;

  KnownChatTemplate known_;
  std::string bos_token_;
  std::string eos_token_;
};

}  // namespace writescope::tokenizer
