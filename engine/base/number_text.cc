#include "engine/base/number_text.h"

#include <charconv>
#include <cmath>
#include <limits>

namespace writescope {
namespace {

template <typename T>
std::string Shortest(T value) {
  char text[64];  // -1.7976931348623157e+308 takes 24.
  return std::string(text, std::to_chars(text, text + sizeof(text), value).ptr);
}

}  // namespace

std::string NumberText(double value) {
  if (std::abs(value) <= std::numeric_limits<float>::max()) {
    const float single = static_cast<float>(value);
    if (value == single) return Shortest(single);
  }
  return Shortest(value);
}

}  // namespace writescope
