// Arguments of a program, made ready for CLI11.
#pragma once

#include <string>
#include <vector>

namespace writescope {

// "--flag=" as "--flag" and an empty value. CLI11 takes the former for a flag whose value comes
// next, and would swallow the argument behind it. What follows a lone "--" stays as it is.
std::vector<std::string> WithEmptyValues(const std::vector<std::string>& arguments);

// A validator of options of 64 bits: empty, or what is wrong with `text` as a decimal number that
// fits uint64_t. CLI11 would make 2^64 - 1 of -1 and of whatever is too large.
std::string CheckUint64(const std::string& text);

}  // namespace writescope
