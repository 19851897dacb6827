#include "engine/tokenizer/chat_template.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "engine/base/status_macros.h"
#include "engine/tokenizer/jinja_outline.h"
#include "engine/tokenizer/strings.h"
#include "engine/tokenizer/tokenizer_config.h"

namespace writescope::tokenizer {
namespace {

using Literals = absl::btree_set<std::string>;

constexpr char kAssistantPrompt[] = "<|im_start|>assistant\n";
constexpr char kThinkingPrompt[] = "<|im_start|>assistant\n<think>\n";
constexpr char kNoThinking[] = "<think>\n\n</think>\n\n";
constexpr char kThinkOpen[] = "<think>";
constexpr char kThinkClose[] = "</think>";
constexpr char kThinkOpenLine[] = "\n<think>\n";
constexpr char kThinkCloseLines[] = "\n</think>\n\n";

// Everything that a Qwen3 template prints for messages without tools.
bool KnownInChatMl(const std::string& literal) {
  static const Literals* const known =
      new Literals{"", "\n", "<|im_start|>", "<|im_end|>", "<|im_end|>\n", "<|im_start|>system\n",
                   kAssistantPrompt, kThinkingPrompt, kNoThinking, kThinkOpen, kThinkClose,
                   kThinkOpenLine, kThinkCloseLines,
                   // Printed only where tools are in play, which Render does not offer.
                   "\n\n", "<|im_start|>user", "\", \"arguments\": "};
  return known->contains(literal) || Contains(literal, "tool") || Contains(literal, "# Tools");
}

bool AllKnownInChatMl(const Literals& printed) {
  for (const std::string& literal : printed) {
    if (!KnownInChatMl(literal)) return false;
  }
  return true;
}

// Whether it calls something, or has a filter, that none of the known templates has: it could
// change what is printed. Parentheses may follow the words of operators and tags, too.
bool MayChangeContent(const JinjaOutline& outline) {
  static const Literals* const calls = new Literals{"namespace",  "raise_exception",
                                                    "startswith", "endswith",
                                                    "split",      "strip",
                                                    "lstrip",     "rstrip",
                                                    "not",        "and",
                                                    "or",         "in",
                                                    "if",         "elif",
                                                    "else",       "is"};
  static const Literals* const filters = new Literals{"tojson", "length", "list", "items"};
  const auto all_known = [](const Literals& used, const Literals& known) {
    return std::includes(known.begin(), known.end(), used.begin(), used.end());
  };
  return !all_known(outline.calls, *calls) || !all_known(outline.filters, *filters) ||
         Contains(outline.code, ".strip()");
}

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
  ASSIGN_OR_RETURN(const JinjaOutline outline, OutlineJinja(jinja));
  const Literals& printed = outline.printed;
  const auto has_code = [&](std::string_view code) { return Contains(outline.code, code); };
  const bool has_prompt_switch = has_code("add_generation_prompt");
  // What follows the content of an answer, where the whole content is printed with EOS behind it.
  const bool prints_eos = has_code(".content+eos_token");
  const bool prints_bos = has_code("bos_token\n");
  std::optional<ChatTemplate> result;
  const auto make = [&](Family family) -> ChatTemplate& {
    return result.emplace(ChatTemplate(family, std::move(bos_token), std::move(eos_token)));
  };
  if (outline.prints_raw_text || MayChangeContent(outline)) {
    // None of ours does either.
  } else if (AllKnownInChatMl(printed) && has_prompt_switch && !has_code("bos_token") &&
             !has_code("eos_token") && printed.contains("<|im_start|>") &&
             (printed.contains("<|im_end|>") || printed.contains("<|im_end|>\n"))) {
    const bool always_thinks = printed.contains(kThinkingPrompt);
    const bool can_skip = printed.contains(kNoThinking) && has_code("enable_thinking");
    const bool drops = printed.contains(kThinkClose);
    const bool keeps = printed.contains(kThinkOpenLine) && has_code("last_query_index");
    const bool one_prompt = always_thinks != printed.contains(kAssistantPrompt);
    if (one_prompt && drops == keeps && !(always_thinks && can_skip)) {
      ChatTemplate& made = make(Family::kChatMl);
      made.reasons_ = keeps;
      made.generation_prompt_.assign(always_thinks ? kThinkingPrompt : kAssistantPrompt);
      if (can_skip) made.no_thinking_prompt_.assign(kNoThinking);
    }
  } else if (printed == Literals{"User: ", "\n\n", "Assistant: ", "Assistant:"} && prints_bos &&
             prints_eos && has_prompt_switch) {
    make(Family::kDeepSeekV2);
  } else if (printed == Literals{"[INST] ", " [/INST]"} && prints_bos && prints_eos) {
    make(Family::kMixtral);
  } else if (printed == Literals{"[INST] ", " [/INST]", " "} && prints_bos &&
             has_code(".content+eos_token+' '\n")) {
    make(Family::kMixtral).behind_eos_.assign(1, ' ');
  } else if (printed == Literals{" [INST] ", " [/INST]", "\n\n", " "} && prints_bos &&
             has_code("' '+message.content+eos_token\n")) {
    make(Family::kMixtralSpaced);
  }
  if (!result.has_value()) {
    return absl::UnimplementedError(
        "the checkpoint's chat template is none of the known ones (Qwen3, DeepSeek-V2, Mixtral); "
        "render the chat yourself and send it as a prompt");
  }
  if (result->family_ != Family::kChatMl &&
      (result->bos_token_.empty() || result->eos_token_.empty())) {
    return absl::InvalidArgumentError(
        "the chat template prints BOS and EOS, but tokenizer_config.json does not name both");
  }
  return *std::move(result);
}

std::string_view ChatTemplate::name() const {
  switch (family_) {
    case Family::kChatMl:
      return "ChatML (Qwen3)";
    case Family::kDeepSeekV2:
      return "User/Assistant (DeepSeek-V2)";
    case Family::kMixtral:
      return "[INST] (Mixtral, first revision)";
    case Family::kMixtralSpaced:
      return "[INST] (Mixtral, second revision)";
  }
  return "";
}

absl::StatusOr<std::vector<Segment>> ChatTemplate::Render(std::span<const ChatMessage> messages,
                                                          const ChatOptions& options) const {
  if (messages.empty()) return absl::InvalidArgumentError("a chat of 0 messages");
  std::vector<Segment> out;
  switch (family_) {
    case Family::kChatMl:
      RenderChatMl(messages, options, &out);
      break;
    case Family::kDeepSeekV2:
      RenderDeepSeekV2(messages, options, &out);
      break;
    case Family::kMixtral:
    case Family::kMixtralSpaced:
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
    if (message.role == ChatRole::kAssistant && reasons_) {
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
  AppendTemplate(generation_prompt_, out);
  if (!options.enable_thinking) AppendTemplate(no_thinking_prompt_, out);
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
  const bool spaced = family_ == Family::kMixtralSpaced;
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
      AppendTemplate(Cat(eos_token_, behind_eos_), out);
    }
  }
  return absl::OkStatus();
}

}  // namespace writescope::tokenizer
