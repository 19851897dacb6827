// Arguments of a program, made ready for CLI11.
#pragma once

#include <string>
#include <vector>

namespace writescope {

// "--flag=" as "--flag" and an empty value. CLI11 takes the former for a flag whose value comes
// next, and would swallow the argument behind it. What follows a lone "--" stays as it is.
std::vector<std::string> WithEmptyValues(const std::vector<std::string>& arguments);

}  // namespace writescope
