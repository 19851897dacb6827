// Whole UTF-8 at the edge: a protobuf `string` that is not loses the rest of its stream without an
// error on either side, so nothing goes out unchecked.
#pragma once

#include <string>
#include <string_view>

namespace writescope {

// RFC 3629: no overlong forms, no surrogates, nothing above U+10FFFF.
bool IsWholeUtf8(std::string_view text);
// Every maximal broken piece becomes one U+FFFD.
std::string RepairUtf8(std::string_view text);

}  // namespace writescope
