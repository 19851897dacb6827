#include "engine/tokenizer/nfc.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "engine/base/check.h"
#include "engine/tokenizer/utf8.h"
#include "unicode/bytestream.h"
#include "unicode/normalizer2.h"
#include "unicode/stringpiece.h"
#include "unicode/uchar.h"
#include "unicode/unistr.h"

namespace writescope::tokenizer {
namespace {

// ICU puts a run of combining marks in order by insertion, which is quadratic. Longer runs than
// this are ordered here first; real text has runs of a few.
constexpr size_t kLongRunChars = 32;

const icu::Normalizer2& Nfc() {
  UErrorCode status = U_ZERO_ERROR;
  const icu::Normalizer2* instance = icu::Normalizer2::getNFCInstance(status);
  CHECK(U_SUCCESS(status)) << "ICU has no NFC data: " << u_errorName(status);
  return *instance;
}

const icu::Normalizer2& Nfd() {
  UErrorCode status = U_ZERO_ERROR;
  const icu::Normalizer2* instance = icu::Normalizer2::getNFDInstance(status);
  CHECK(U_SUCCESS(status)) << "ICU has no NFD data: " << u_errorName(status);
  return *instance;
}

// Whether the character's decomposition begins with a combining mark that canonical ordering may
// move (class above 0). None lies below U+0300.
bool StartsWithMovableMark(char32_t c) {
  return c >= 0x300 &&
         u_getIntPropertyValue(static_cast<UChar32>(c), UCHAR_LEAD_CANONICAL_COMBINING_CLASS) != 0;
}

// Appends the run, decomposed and in canonical order, which leaves the text canonically equal.
void AppendOrderedRun(std::string_view run, std::string* out) {
  struct Mark {
    UChar32 character;
    uint8_t combining_class;
  };
  std::vector<Mark> marks;
  marks.reserve(run.size() / 2);
  icu::UnicodeString decomposition;
  for (size_t pos = 0; pos < run.size();) {
    const auto c = static_cast<UChar32>(DecodeAt(run, pos, &pos));
    if (!Nfd().getDecomposition(c, decomposition)) {
      marks.push_back({c, Nfd().getCombiningClass(c)});
      continue;
    }
    for (int32_t i = 0; i < decomposition.length(); i = decomposition.moveIndex32(i, 1)) {
      const UChar32 part = decomposition.char32At(i);
      marks.push_back({part, Nfd().getCombiningClass(part)});
    }
  }
  // A mark of class 0 is a border that none crosses; only the stretches between are ordered.
  auto stretch = marks.begin();
  while (stretch != marks.end()) {
    const auto border = std::find_if(stretch, marks.end(),
                                     [](const Mark& mark) { return mark.combining_class == 0; });
    std::stable_sort(stretch, border, [](const Mark& a, const Mark& b) {
      return a.combining_class < b.combining_class;
    });
    stretch = border == marks.end() ? border : border + 1;
  }
  for (const Mark& mark : marks) AppendUtf8(static_cast<char32_t>(mark.character), out);
}

std::string OrderLongRuns(std::string_view text) {
  std::string ordered;
  ordered.reserve(text.size());
  size_t pos = 0;
  while (pos < text.size()) {
    size_t next = 0;
    if (!StartsWithMovableMark(DecodeAt(text, pos, &next))) {
      ordered.append(text.substr(pos, next - pos));
      pos = next;
      continue;
    }
    const size_t run_begin = pos;
    size_t run_chars = 0;
    while (pos < text.size() && StartsWithMovableMark(DecodeAt(text, pos, &next))) {
      pos = next;
      ++run_chars;
    }
    const std::string_view run = text.substr(run_begin, pos - run_begin);
    if (run_chars > kLongRunChars) {
      AppendOrderedRun(run, &ordered);
    } else {
      ordered.append(run);
    }
  }
  return ordered;
}

}  // namespace

std::string NormalizeNfc(std::string_view text) {
  // Text below U+0300 is in this form already; its UTF-8 has no byte of 0xCC or above.
  const bool below_marks = std::all_of(text.begin(), text.end(),
                                       [](char c) { return static_cast<unsigned char>(c) < 0xCC; });
  if (below_marks) return std::string(text);
  const std::string ordered = OrderLongRuns(text);
  std::string normalized;
  icu::StringByteSink<std::string> sink(&normalized, static_cast<int32_t>(ordered.size()));
  UErrorCode status = U_ZERO_ERROR;
  // ICU counts in int32; Tokenizer::Encode refuses long text before it comes here.
  CHECK_LE(ordered.size(), size_t{INT32_MAX});
  Nfc().normalizeUTF8(0, icu::StringPiece(ordered.data(), static_cast<int32_t>(ordered.size())),
                      sink, nullptr, status);
  CHECK(U_SUCCESS(status)) << "NFC of " << ordered.size() << " bytes: " << u_errorName(status);
  return normalized;
}

}  // namespace writescope::tokenizer
