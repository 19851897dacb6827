#include "engine/tokenizer/char_set.h"

#include "engine/base/check.h"
#include "unicode/uchar.h"

namespace writescope::tokenizer {
namespace {

icu::UnicodeSet FromPattern(const char* pattern) {
  UErrorCode status = U_ZERO_ERROR;
  icu::UnicodeSet set(icu::UnicodeString::fromUTF8(pattern), status);
  CHECK(U_SUCCESS(status)) << "ICU set " << pattern << ": " << u_errorName(status);
  set.freeze();
  return set;
}

}  // namespace

CharSet::CharSet(const icu::UnicodeSet& set) {
  for (UChar32 c = 0; c < 128; ++c) {
    if (set.contains(c)) ascii_[static_cast<size_t>(c) >> 6] |= uint64_t{1} << (c & 63);
  }
  auto copy = std::make_unique<icu::UnicodeSet>(set);
  copy->freeze();
  set_ = std::move(copy);
}

const icu::UnicodeSet& WhiteSpaceSet() {
  static const icu::UnicodeSet set = FromPattern("[\\p{White_Space}]");
  return set;
}

const icu::UnicodeSet& DecimalDigitSet() {
  static const icu::UnicodeSet set = FromPattern("[\\p{Nd}]");
  return set;
}

const icu::UnicodeSet& WordSet() {
  static const icu::UnicodeSet set =
      FromPattern("[\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\u00B2\\u00B3\\u00B9\\u00BC-\\u00BE]");
  return set;
}

bool IsWhiteSpace(char32_t character) {
  return u_isUWhiteSpace(static_cast<UChar32>(character)) != 0;
}

bool IsWordCharacter(char32_t character) {
  static const icu::UnicodeSet set =
      FromPattern("[\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\p{Join_Control}]");
  return set.contains(static_cast<UChar32>(character)) != 0;
}

bool IsNumeric(char32_t character) {
  return (U_MASK(u_charType(static_cast<UChar32>(character))) & U_GC_N_MASK) != 0;
}

}  // namespace writescope::tokenizer
