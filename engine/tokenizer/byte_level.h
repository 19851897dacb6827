// The spelling of bytes in byte-level vocabularies: every byte has one printable character, itself
// where it is a printable Latin-1 character, else the next from U+0100 on.
#pragma once

#include <array>
#include <string>
#include <string_view>

namespace writescope::tokenizer {

// The UTF-8 spelling of each byte.
const std::array<std::string, 256>& ByteSpellings();

// The bytes that a token spells; a token with a character that spells no byte stands for its own
// text.
std::string BytesOfSpelling(std::string_view token);

// The inverse for any bytes.
std::string SpellingOfBytes(std::string_view bytes);

}  // namespace writescope::tokenizer
