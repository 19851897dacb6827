// Unicode normalisation form C, in time n log n on any text.
#pragma once

#include <string>
#include <string_view>

namespace writescope::tokenizer {

// `text` is well-formed UTF-8.
std::string NormalizeNfc(std::string_view text);

}  // namespace writescope::tokenizer
