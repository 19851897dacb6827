// Chats of any order and content, as the template's own program renders them.
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "engine/tokenizer/chat_template.h"
#include "nlohmann/json.hpp"
#include "tests/engine/tokenizer/tokenizer_test_util.h"

namespace writescope::tokenizer {
namespace {

ChatRole RoleOf(const std::string& name) {
  if (name == "system") return ChatRole::kSystem;
  return name == "user" ? ChatRole::kUser : ChatRole::kAssistant;
}

// A template that refuses an order of roles has no text.
TEST(ChatRenderingsTest, AreThoseOfJinja) {
  const nlohmann::json data = ReadTestdata("chat-renderings.json");
  std::map<std::string, ChatTemplate> templates;
  for (const auto& [name, jinja] : data["templates"].items()) {
    auto matched = ChatTemplate::Match(jinja.get<std::string>(), data["bos"], data["eos"]);
    ASSERT_TRUE(matched.ok()) << name << ": " << matched.status();
    templates.emplace(name, *std::move(matched));
  }
  int rendered = 0;
  int refused = 0;
  for (const nlohmann::json& chat : data["cases"]) {
    SCOPED_TRACE(chat.dump());
    std::vector<ChatMessage> messages;
    for (const nlohmann::json& message : chat["messages"]) {
      messages.push_back({RoleOf(message["role"]), message["content"]});
    }
    const auto segments =
        templates.at(chat["template"])
            .Render(messages, {.add_generation_prompt = chat["add_generation_prompt"],
                               .enable_thinking = chat["enable_thinking"]});
    EXPECT_EQ(segments.ok(), chat["text"].is_string()) << segments.status();
    if (!segments.ok()) {
      ++refused;
      continue;
    }
    std::string text;
    for (const Segment& segment : *segments) text += segment.text;
    EXPECT_EQ(text, chat["text"].get<std::string>());
    ++rendered;
  }
  EXPECT_GT(rendered, 200);
  EXPECT_GT(refused, 20);
}

}  // namespace
}  // namespace writescope::tokenizer
