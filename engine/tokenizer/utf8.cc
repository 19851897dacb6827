#include "engine/tokenizer/utf8.h"

namespace writescope::tokenizer {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

struct LeadByte {
  int missing;  // Continuation bytes to follow; 0 for ASCII, -1 where no character starts so.
  unsigned char low;
  unsigned char high;
};

// The bounds of the second byte are what excludes overlong forms, surrogates and values that are
// too large (Unicode standard, table 3-7).
LeadByte ClassifyLead(unsigned char byte) {
  if (byte < 0x80) return {0, 0, 0};
  if (byte < 0xC2) return {-1, 0, 0};
  if (byte < 0xE0) return {1, 0x80, 0xBF};
  if (byte < 0xF0) {
    const unsigned char low = byte == 0xE0 ? 0xA0 : 0x80;
    const unsigned char high = byte == 0xED ? 0x9F : 0xBF;
    return {2, low, high};
  }
  if (byte < 0xF5) {
    const unsigned char low = byte == 0xF0 ? 0x90 : 0x80;
    const unsigned char high = byte == 0xF4 ? 0x8F : 0xBF;
    return {3, low, high};
  }
  return {-1, 0, 0};
}

}  // namespace

size_t FindInvalidUtf8(std::string_view text) {
  size_t pos = 0;
  while (pos < text.size()) {
    const LeadByte lead = ClassifyLead(static_cast<unsigned char>(text[pos]));
    if (lead.missing < 0 || text.size() - pos <= static_cast<size_t>(lead.missing)) return pos;
    unsigned char low = lead.low;
    unsigned char high = lead.high;
    for (int i = 1; i <= lead.missing; ++i) {
      const auto byte = static_cast<unsigned char>(text[pos + static_cast<size_t>(i)]);
      if (byte < low || byte > high) return pos;
      low = 0x80;
      high = 0xBF;
    }
    pos += 1 + static_cast<size_t>(lead.missing);
  }
  return std::string_view::npos;
}

void AppendUtf8(char32_t character, std::string* out) {
  const auto put = [out](char32_t byte) { out->push_back(static_cast<char>(byte)); };
  if (character < 0x80) {
    put(character);
  } else if (character < 0x800) {
    put(0xC0 | character >> 6);
    put(0x80 | (character & 0x3F));
  } else if (character < 0x10000) {
    put(0xE0 | character >> 12);
    put(0x80 | (character >> 6 & 0x3F));
    put(0x80 | (character & 0x3F));
  } else {
    put(0xF0 | character >> 18);
    put(0x80 | (character >> 12 & 0x3F));
    put(0x80 | (character >> 6 & 0x3F));
    put(0x80 | (character & 0x3F));
  }
}

void Utf8Repairer::Feed(std::string_view bytes, std::string* out) {
  for (const char c : bytes) {
    const auto byte = static_cast<unsigned char>(c);
    if (missing_ > 0) {
      if (byte >= low_ && byte <= high_) {
        held_.push_back(c);
        low_ = 0x80;
        high_ = 0xBF;
        if (--missing_ == 0) {
          out->append(held_);
          held_.clear();
        }
        continue;
      }
      Finish(out);  // The held bytes can no longer become whole; this byte starts afresh.
    }
    const LeadByte lead = ClassifyLead(byte);
    if (lead.missing == 0) {
      out->push_back(c);
    } else if (lead.missing < 0) {
      out->append(kReplacement);
    } else {
      held_.assign(1, c);
      missing_ = lead.missing;
      low_ = lead.low;
      high_ = lead.high;
    }
  }
}

void Utf8Repairer::Finish(std::string* out) {
  if (missing_ == 0) return;
  out->append(kReplacement);
  held_.clear();
  missing_ = 0;
}

}  // namespace writescope::tokenizer
