#include "engine/tokenizer/known_chat_templates.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_replace.h"
#include "engine/base/check.h"
#include "engine/base/status_macros.h"
#include "engine/tokenizer/jinja_outline.h"
#include "engine/tokenizer/strings.h"

namespace writescope::tokenizer {
namespace {

using Statements = std::vector<JinjaStatement>;

// The templates below are what runs of the published ones without tools. Each has a body, and most
// a tail, which begins the answer.
struct Body {
  const char* name;  // For messages.
  const char* jinja;
  ChatFamily family;
  bool reasons;
  const char* behind_eos;
};
struct Tail {
  ChatFamily family;
  const char* jinja;
  const char* generation_prompt;
  const char* no_thinking_prompt;
};

// Of Qwen3 as it was published first.
constexpr char kQwen3[] = R"(
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- set reasoning_content = '' %}
        {%- if '</think>' in message.content %}
            {%- set content = message.content.split('</think>')[-1].lstrip('\n') %}
            {%- set reasoning_content = message.content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %})";

// Of its later revisions, 2507 Thinking among them, which take content that is no string, too.
constexpr char kQwen3Revised[] = R"(
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %})";

// Of 2507 Instruct, which does not know reasoning.
constexpr char kQwen3Instruct[] = R"(
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role + '\n' + content }}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %})";

constexpr char kPlainChatMl[] = R"(
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %})";

constexpr char kDeepSeekV2[] = R"(
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- 'User: ' + message.content + '\n\n' }}
    {%- elif message.role == 'assistant' %}
        {{- 'Assistant: ' + message.content + eos_token }}
    {%- elif message.role == 'system' %}
        {{- message.content + '\n\n' }}
    {%- endif %}
{%- endfor %})";

constexpr char kMixtral[] = R"(
{{- bos_token }}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + message.content + ' [/INST]' }}
    {%- elif message.role == 'assistant' %}
        {{- message.content + eos_token }}
    {%- else %}
        {{- raise_exception('') }}
    {%- endif %}
{%- endfor %})";

constexpr char kMixtralSpaceBehind[] = R"(
{{- bos_token }}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + message.content + ' [/INST]' }}
    {%- elif message.role == 'assistant' %}
        {{- message.content + eos_token + ' ' }}
    {%- else %}
        {{- raise_exception('') }}
    {%- endif %}
{%- endfor %})";

constexpr char kMixtralSpaced[] = R"(
{%- if messages[0].role == 'system' %}
    {%- set system_message = messages[0].content %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {%- if loop.first and system_message is defined %}
            {{- ' [INST] ' + system_message + '\n\n' + message.content + ' [/INST]' }}
        {%- else %}
            {{- ' [INST] ' + message.content + ' [/INST]' }}
        {%- endif %}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content + eos_token }}
    {%- else %}
        {{- raise_exception('') }}
    {%- endif %}
{%- endfor %})";

constexpr Tail kTails[] = {
    {ChatFamily::kChatMl, R"({%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %})",
     "<|im_start|>assistant\n", ""},
    {ChatFamily::kChatMl, R"({%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %})",
     "<|im_start|>assistant\n", "<think>\n\n</think>\n\n"},
    {ChatFamily::kChatMl, R"({%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n<think>\n' }}
{%- endif %})",
     "<|im_start|>assistant\n<think>\n", ""},
    {ChatFamily::kDeepSeekV2, R"({%- if add_generation_prompt %}
    {{- 'Assistant:' }}
{%- endif %})",
     "Assistant:", ""},
    {ChatFamily::kMixtral, "", "", ""},
    {ChatFamily::kMixtralSpaced, "", "", ""},
};

constexpr Body kBodies[] = {
    {"Qwen3", kQwen3, ChatFamily::kChatMl, true, ""},
    {"Qwen3", kQwen3Revised, ChatFamily::kChatMl, true, ""},
    {"Qwen3", kQwen3Instruct, ChatFamily::kChatMl, false, ""},
    {"ChatML", kPlainChatMl, ChatFamily::kChatMl, false, ""},
    {"DeepSeek-V2", kDeepSeekV2, ChatFamily::kDeepSeekV2, false, ""},
    {"Mixtral", kMixtral, ChatFamily::kMixtral, false, ""},
    {"Mixtral", kMixtralSpaceBehind, ChatFamily::kMixtral, false, " "},
    {"Mixtral", kMixtralSpaced, ChatFamily::kMixtralSpaced, false, ""},
};

struct Known {
  const char* name;
  Statements statements;
  KnownChatTemplate properties;
};

const std::vector<Known>& AllKnown() {
  static const std::vector<Known>* const all = [] {
    auto* result = new std::vector<Known>;
    for (const Body& body : kBodies) {
      for (const Tail& tail : kTails) {
        if (tail.family != body.family) continue;
        auto statements = OutlineJinja(Cat(body.jinja, tail.jinja));
        CHECK(statements.ok());
        result->push_back({body.name,
                           *std::move(statements),
                           {.family = body.family,
                            .reasons = body.reasons,
                            .generation_prompt = tail.generation_prompt,
                            .no_thinking_prompt = tail.no_thinking_prompt,
                            .behind_eos = body.behind_eos}});
      }
    }
    return result;
  }();
  return *all;
}

// How many statements are the same from the first on.
size_t SameStatements(const Statements& left, const Statements& right) {
  const auto same = [](const JinjaStatement& a, const JinjaStatement& b) {
    return a.code == b.code;
  };
  return static_cast<size_t>(
      std::mismatch(left.begin(), left.end(), right.begin(), right.end(), same).first -
      left.begin());
}

// A template is foreign text: a statement of it may be long, and have several lines.
std::string ForMessage(std::string_view source) {
  std::string text = absl::StrReplaceAll(ToAbsl(source), {{"\n", " "}});
  constexpr size_t kMaxBytes = 120;
  if (text.size() <= kMaxBytes) return text;
  size_t size = kMaxBytes;
  while (size > 0 && (static_cast<unsigned char>(text[size]) & 0xC0) == 0x80) --size;
  return Cat(std::string_view(text).substr(0, size), "...");
}

}  // namespace

absl::StatusOr<KnownChatTemplate> RecogniseChatTemplate(std::string_view jinja) {
  ASSIGN_OR_RETURN(const Statements statements, OutlineJinja(jinja));
  const Known* nearest = nullptr;
  size_t nearest_same = 0;
  for (const Known& known : AllKnown()) {
    const size_t same = SameStatements(statements, known.statements);
    if (same == statements.size() && same == known.statements.size()) return known.properties;
    if (nearest == nullptr || same > nearest_same) {
      nearest = &known;
      nearest_same = same;
    }
  }
  std::string difference;
  if (nearest_same < statements.size()) {
    difference = Cat(nearest_same == 0 ? "none of them begins with "
                                       : Cat("unlike the one of ", nearest->name, " it has "),
                     ForMessage(statements[nearest_same].source));
  } else {
    difference = Cat("unlike the one of ", nearest->name, " it ends without ",
                     nearest->statements[nearest_same].source);
  }
  return absl::UnimplementedError(Cat(
      "the checkpoint's chat template is none of the known ones (Qwen3, DeepSeek-V2, Mixtral): ",
      difference, "; render the chat yourself and send it as a prompt"));
}

}  // namespace writescope::tokenizer
