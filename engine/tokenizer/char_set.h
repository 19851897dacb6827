// A set of Unicode characters with a quick membership test: a bitmap for ASCII, ICU's frozen set
// behind it. Also the properties that tokenizer files name.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "unicode/uniset.h"

namespace writescope::tokenizer {

// Thread-safe: never changes after it is made.
class CharSet {
 public:
  explicit CharSet(const icu::UnicodeSet& set);

  bool Contains(char32_t character) const {
    if (character < 128) return (ascii_[character >> 6] >> (character & 63) & 1) != 0;
    return set_->contains(static_cast<UChar32>(character)) != 0;
  }

 private:
  std::array<uint64_t, 2> ascii_ = {0, 0};
  std::unique_ptr<const icu::UnicodeSet> set_;
};

// What `\s`, `\d` and `\w` mean in the regular expressions of tokenizer.json. Oniguruma, which the
// files are written for, counts the superscripts and fractions of Latin-1 as words and no others.
const icu::UnicodeSet& WhiteSpaceSet();
const icu::UnicodeSet& DecimalDigitSet();
const icu::UnicodeSet& WordSet();

bool IsWhiteSpace(char32_t character);
bool IsWordCharacter(char32_t character);  // At the edges of added tokens that are whole words.
bool IsNumeric(char32_t character);        // General category N: decimal digits, letters, others.

}  // namespace writescope::tokenizer
