#include "engine/tokenizer/added_tokens.h"

#include <algorithm>
#include <utility>

#include "engine/tokenizer/char_set.h"
#include "engine/tokenizer/utf8.h"

namespace writescope::tokenizer {

bool AddedToken::IsControl() const {
  if (special) return true;
  for (size_t pos = 0; pos < content.size();) {
    const char32_t c = DecodeAt(content, pos, &pos);
    if (!IsWhiteSpace(c) && c != U'\u2581') return true;  // U+2581 spells a space.
  }
  return false;
}

AddedTokenMatcher::AddedTokenMatcher(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)) {
  token_at_.push_back(-1);
  for (size_t i = 0; i < tokens_.size(); ++i) {
    const std::string& content = tokens_[i].content;
    uint64_t node = 0;
    for (const char c : content) {
      const auto byte = static_cast<unsigned char>(c);
      const auto [child, is_new] =
          children_.try_emplace(node << 8 | byte, static_cast<uint32_t>(token_at_.size()));
      if (is_new) token_at_.push_back(-1);
      node = child->second;
    }
    if (content.empty()) continue;
    starts_[static_cast<unsigned char>(content.front())] = true;
    token_at_[node] = static_cast<int>(i);
  }
}

const AddedToken* AddedTokenMatcher::LongestAt(std::string_view text, size_t pos, size_t end,
                                               size_t control_end) const {
  const AddedToken* longest = nullptr;
  uint64_t node = 0;
  for (size_t at = pos; at < end; ++at) {
    const auto child = children_.find(node << 8 | static_cast<unsigned char>(text[at]));
    if (child == children_.end()) break;
    node = child->second;
    if (token_at_[node] < 0) continue;
    const AddedToken& token = tokens_[static_cast<size_t>(token_at_[node])];
    if (at + 1 <= control_end || !token.IsControl()) longest = &token;
  }
  return longest;
}

void AddedTokenMatcher::Find(std::string_view text, ByteRange range,
                             std::span<const ByteRange> control_ranges,
                             std::vector<Match>* matches) const {
  if (tokens_.empty()) return;
  size_t previous_end = range.begin;
  size_t control = 0;
  for (size_t pos = range.begin; pos < range.end;) {
    if (!starts_[static_cast<unsigned char>(text[pos])]) {
      ++pos;
      continue;
    }
    while (control < control_ranges.size() && control_ranges[control].end <= pos) ++control;
    const bool marked = control < control_ranges.size() && control_ranges[control].begin <= pos;
    const size_t control_begin = marked ? control_ranges[control].begin : pos;
    const size_t control_end = marked ? control_ranges[control].end : pos;
    const AddedToken* token = LongestAt(text, pos, range.end, control_end);
    if (token == nullptr) {
      ++pos;
      continue;
    }
    Match match = {pos, pos + token->content.size(), token->id};
    pos = match.end;
    if (token->single_word) {
      size_t unused = 0;
      const bool joined_left =
          match.begin > range.begin &&
          IsWordCharacter(DecodeAt(text, PreviousChar(text, match.begin), &unused));
      const bool joined_right =
          match.end < range.end && IsWordCharacter(DecodeAt(text, match.end, &unused));
      if (joined_left || joined_right) continue;
    }
    // A control token takes no white space out of a user's text.
    const size_t left_limit = std::max(previous_end, token->IsControl() ? control_begin : 0);
    const size_t right_limit = std::min(range.end, token->IsControl() ? control_end : range.end);
    size_t next = 0;
    while (token->lstrip && match.begin > left_limit) {
      const size_t before = PreviousChar(text, match.begin);
      if (before < left_limit || !IsWhiteSpace(DecodeAt(text, before, &next))) break;
      match.begin = before;
    }
    while (token->rstrip && match.end < right_limit) {
      if (!IsWhiteSpace(DecodeAt(text, match.end, &next)) || next > right_limit) break;
      match.end = next;
    }
    pos = match.end;
    previous_end = match.end;
    matches->push_back(match);
  }
}

}  // namespace writescope::tokenizer
