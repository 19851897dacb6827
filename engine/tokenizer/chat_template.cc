#include "engine/tokenizer/chat_template.h"

#include <utility>

#include "absl/status/status.h"
#include "engine/base/status_macros.h"
#include "engine/tokenizer/strings.h"
#include "engine/tokenizer/tokenizer_config.h"

namespace writescope::tokenizer {
namespace {

constexpr char kThinkOpen[] = "<think>";
constexpr char kThinkClose[] = "</think>";
constexpr char kThinkOpenLine[] = "\n<think>\n";
constexpr char kThinkCloseLines[] = "\n</think>\n\n";

// Appends to the last segment where it is of the same kind.
void Append(std::string_view text, bool allow_special, std::vector<Segment>* out) {
  if (text.empty()) return;
  if (!out->empty() && out->back().allow_special == allow_special) {
    out->back().text.append(text);
  } else {
    out->push_back({std::string(text), allow_special});
  }
}
void AppendTemplate(std::string_view text, std::vector<Segment>* out) { Append(text, true, out); }
void AppendContent(std::string_view text, std::vector<Segment>* out) { Append(text, false, out); }

std::string_view StripNewlines(std::string_view text, bool front, bool back) {
  while (front && text.starts_with("\n")) text.remove_prefix(1);
  while (back && text.ends_with("\n")) text.remove_suffix(1);
  return text;
}

// An answer of a reasoning model, cut as Qwen3's template cuts it.
struct Answer {
  std::string_view reasoning;
  std::string_view content;
};

Answer SplitAnswer(std::string_view text) {
  const size_t first_close = text.find(kThinkClose);
  if (first_close == std::string_view::npos) return {{}, text};
  const size_t last_close = text.rfind(kThinkClose);
  std::string_view reasoning = StripNewlines(text.substr(0, first_close), false, true);
  if (const size_t open = reasoning.rfind(kThinkOpen); open != std::string_view::npos) {
    reasoning.remove_prefix(open + std::string_view(kThinkOpen).size());
  }
  return {
      StripNewlines(reasoning, true, true),
      StripNewlines(text.substr(last_close + std::string_view(kThinkClose).size()), true, false)};
}

// Index of the last message in which a user asks something, rather than handing a tool's answer in.
size_t LastQuery(std::span<const ChatMessage> messages) {
  for (size_t i = messages.size(); i-- > 0;) {
    const std::string& content = messages[i].content;
    if (messages[i].role == ChatRole::kUser &&
        !(content.starts_with("<tool_response>") && content.ends_with("</tool_response>"))) {
      return i;
    }
  }
  return messages.size() - 1;
}

std::string_view RoleName(ChatRole role) {
  switch (role) {
    case ChatRole::kSystem:
      return "system";
    case ChatRole::kUser:
      return "user";
    case ChatRole::kAssistant:
      return "assistant";
  }
  return "";
}

}  // namespace

absl::StatusOr<ChatTemplate> ChatTemplate::Load(const std::string& model_dir) {
  ASSIGN_OR_RETURN(const TokenizerConfig config, TokenizerConfig::Load(model_dir));
  if (!config.chat_template.has_value()) {
    return absl::NotFoundError(
        Cat("no chat template in ", model_dir,
            ": the checkpoint is a base model; give it plain text to continue instead of a chat"));
  }
  return Match(*config.chat_template, config.bos_token, config.eos_token);
}

absl::StatusOr<ChatTemplate> ChatTemplate::Match(std::string_view jinja, std::string bos_token,
                                                 std::string eos_token) {
  ASSIGN_OR_RETURN(KnownChatTemplate known, RecogniseChatTemplate(jinja));
  if (known.family != ChatFamily::kChatMl && (bos_token.empty() || eos_token.empty())) {
    return absl::InvalidArgumentError(
        "the chat template prints BOS and EOS, but tokenizer_config.json does not name both");
  }
  return ChatTemplate(std::move(known), std::move(bos_token), std::move(eos_token));
}

std::string_view ChatTemplate::name() const {
  switch (known_.family) {
    case ChatFamily::kChatMl:
      return "ChatML (Qwen3)";
    case ChatFamily::kDeepSeekV2:
      return "User/Assistant (DeepSeek-V2)";
    case ChatFamily::kMixtral:
      return "[INST] (Mixtral, first revision)";
    case ChatFamily::kMixtralSpaced:
      return "[INST] (Mixtral, second revision)";
  }
  return "";
}

absl::StatusOr<std::vector<Segment>> ChatTemplate::Render(std::span<const ChatMessage> messages,
                                                          const ChatOptions& options) const {
  if (messages.empty()) return absl::InvalidArgumentError("a chat of 0 messages");
  std::vector<Segment> out;
  switch (known_.family) {
    case ChatFamily::kChatMl:
      RenderChatMl(messages, options, &out);
      break;
    case ChatFamily::kDeepSeekV2:
      RenderDeepSeekV2(messages, options, &out);
      break;
    case ChatFamily::kMixtral:
    case ChatFamily::kMixtralSpaced:
      RETURN_IF_ERROR(RenderMixtral(messages, &out));
      break;
  }
  return out;
}

void ChatTemplate::RenderChatMl(std::span<const ChatMessage> messages, const ChatOptions& options,
                                std::vector<Segment>* out) const {
  const size_t last_query = LastQuery(messages);
  for (size_t i = 0; i < messages.size(); ++i) {
    const ChatMessage& message = messages[i];
    AppendTemplate(Cat("<|im_start|>", RoleName(message.role)), out);
    if (message.role == ChatRole::kAssistant && known_.reasons) {
      // Reasoning that led to an earlier answer is dropped; after the last question it stays.
      const Answer answer = SplitAnswer(message.content);
      const bool last = i + 1 == messages.size();
      if (i > last_query && (last || !answer.reasoning.empty())) {
        AppendTemplate(kThinkOpenLine, out);
        AppendContent(answer.reasoning, out);
        AppendTemplate(kThinkCloseLines, out);
        AppendContent(StripNewlines(answer.content, true, false), out);
      } else {
        AppendTemplate("\n", out);
        AppendContent(answer.content, out);
      }
    } else {
      AppendTemplate("\n", out);
      AppendContent(message.content, out);
    }
    AppendTemplate("<|im_end|>\n", out);
  }
  if (!options.add_generation_prompt) return;
  AppendTemplate(known_.generation_prompt, out);
  if (!options.enable_thinking) AppendTemplate(known_.no_thinking_prompt, out);
}

void ChatTemplate::RenderDeepSeekV2(std::span<const ChatMessage> messages,
                                    const ChatOptions& options, std::vector<Segment>* out) const {
  AppendTemplate(bos_token_, out);
  for (const ChatMessage& message : messages) {
    switch (message.role) {
      case ChatRole::kSystem:
        AppendContent(message.content, out);
        AppendTemplate("\n\n", out);
        break;
      case ChatRole::kUser:
        AppendTemplate("User: ", out);
        AppendContent(message.content, out);
        AppendTemplate("\n\n", out);
        break;
      case ChatRole::kAssistant:
        AppendTemplate("Assistant: ", out);
        AppendContent(message.content, out);
        AppendTemplate(eos_token_, out);
        break;
    }
  }
  if (options.add_generation_prompt) AppendTemplate("Assistant:", out);
}

absl::Status ChatTemplate::RenderMixtral(std::span<const ChatMessage> messages,
                                         std::vector<Segment>* out) const {
  const bool spaced = known_.family == ChatFamily::kMixtralSpaced;
  const std::string_view space = spaced ? " " : "";
  const bool has_system = spaced && messages[0].role == ChatRole::kSystem;
  AppendTemplate(bos_token_, out);
  const size_t first = has_system ? 1 : 0;
  for (size_t i = first; i < messages.size(); ++i) {
    const ChatMessage& message = messages[i];
    const ChatRole expected = (i - first) % 2 == 0 ? ChatRole::kUser : ChatRole::kAssistant;
    if (message.role != expected) {
      return absl::InvalidArgumentError(
          Cat("message ", i, " is of role ", RoleName(message.role),
              " where this template expects ", RoleName(expected), ": the roles alternate",
              spaced ? ", after at most one system message" : ", without a system message"));
    }
    if (message.role == ChatRole::kUser) {
      AppendTemplate(Cat(space, "[INST] "), out);
      if (has_system && i == first) {
        AppendContent(messages[0].content, out);
        AppendTemplate("\n\n", out);
      }
      AppendContent(message.content, out);
      AppendTemplate(" [/INST]", out);
    } else {
      AppendTemplate(space, out);
      AppendContent(message.content, out);
      AppendTemplate(Cat(eos_token_, known_.behind_eos), out);
    }
  }
  return absl::OkStatus();
}

}  // namespace writescope::tokenizer
