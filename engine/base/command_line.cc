#include "engine/base/command_line.h"

#include <cstdint>
#include <limits>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace writescope {

std::vector<std::string> WithEmptyValues(const std::vector<std::string>& arguments) {
  std::vector<std::string> result;
  bool flags_over = false;
  for (const std::string& argument : arguments) {
    if (argument == "--") flags_over = true;
    const bool empty_value = !flags_over && argument.size() > 3 &&
                             argument.compare(0, 2, "--") == 0 &&
                             argument.find('=') == argument.size() - 1;
    if (!empty_value) {
      result.push_back(argument);
      continue;
    }
    result.push_back(argument.substr(0, argument.size() - 1));
    result.emplace_back();
  }
  return result;
}

namespace {

// "0x10" and "010" would be 16 and 8 to CLI11.
bool IsDecimal(const std::string& text) {
  const size_t sign = text.starts_with('-') || text.starts_with('+') ? 1 : 0;
  return text.size() == sign + 1 || text[sign] != '0';
}

template <typename T>
std::string CheckWhole(const std::string& text) {
  T value = 0;
  if (absl::SimpleAtoi(text, &value) && IsDecimal(text)) return "";
  return absl::StrCat("'", text, "' is not a whole number from ", std::numeric_limits<T>::min(),
                      " to ", std::numeric_limits<T>::max());
}

}  // namespace

std::string CheckUint64(const std::string& text) { return CheckWhole<uint64_t>(text); }
std::string CheckInt64(const std::string& text) { return CheckWhole<int64_t>(text); }
std::string CheckUint32(const std::string& text) { return CheckWhole<uint32_t>(text); }
std::string CheckInt32(const std::string& text) { return CheckWhole<int32_t>(text); }

std::string CheckDouble(const std::string& text) {
  double value = 0;
  if (absl::SimpleAtod(text, &value)) return "";
  return absl::StrCat("'", text, "' is not a number");
}

}  // namespace writescope
