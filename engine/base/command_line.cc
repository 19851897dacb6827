#include "engine/base/command_line.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string_view>

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

// How many letters of one have to be changed, left out or put in to make it the other.
size_t Distance(std::string_view from, std::string_view to) {
  std::vector<size_t> row(to.size() + 1);  // Of the distances from a beginning of `from`.
  std::iota(row.begin(), row.end(), 0);
  for (size_t i = 0; i < from.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i + 1;
    for (size_t j = 0; j < to.size(); ++j) {
      const size_t changed = diagonal + (from[i] == to[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({changed, diagonal + 1, row[j] + 1});
    }
  }
  return row.back();
}

// " did you mean ..?" where one of the names is near, or goes on as this one begins.
std::string Suggestion(std::string_view typed, const std::vector<std::string>& names) {
  constexpr size_t kMostErrors = 2;
  constexpr size_t kShortest = 4;  // Of fewer letters, dashes included, any other may be meant.
  if (typed.size() < kShortest) return "";
  const std::string* nearest = nullptr;
  size_t least = kMostErrors + 1;
  for (const std::string& name : names) {
    const size_t errors =
        std::string_view(name).starts_with(typed) ? size_t{1} : Distance(typed, name);
    if (errors >= least) continue;
    least = errors;
    nearest = &name;
  }
  return nearest == nullptr ? "" : absl::StrCat("; did you mean ", *nearest, "?");
}

}  // namespace

std::string ExplainUnexpected(const std::string& argument, const std::vector<std::string>& flags,
                              const std::vector<std::string>& subcommands) {
  if (argument.size() > 1 && argument[0] == '-') {
    const std::string flag = argument.substr(0, argument.find('='));
    if (std::find(flags.begin(), flags.end(), flag) != flags.end()) {
      return absl::StrCat("'", flag,
                          "' stands in front of the subcommand that has it, or behind --");
    }
    return absl::StrCat("'", flag, "' is no flag here", Suggestion(flag, flags));
  }
  if (!subcommands.empty()) {
    return absl::StrCat("'", argument, "' is no subcommand here",
                        Suggestion(argument, subcommands));
  }
  return absl::StrCat("'", argument, "' is one argument too many");
}

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
