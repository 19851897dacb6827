#include "server/config_file.h"

#include <cstdint>
#include <sstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "engine/base/regular_file.h"

namespace writescope::server {
namespace {

constexpr int64_t kMaxBytes = 1 << 20;

// The line without its comment. A quote ends at the next of its kind: the library knows no escapes.
std::string WithoutComment(const std::string& line) {
  char quote = 0;
  for (size_t i = 0; i < line.size(); ++i) {
    const char c = line[i];
    if (quote != 0) {
      if (c == quote) quote = 0;
    } else if (c == '"' || c == '\'') {
      quote = c;
    } else if (c == '#') {
      return line.substr(0, i);
    }
  }
  return line;
}

bool LacksValue(const std::string& line) {
  const size_t equals = line.find('=');
  return equals != std::string::npos && line.find_first_not_of(" \t\r", equals + 1) == line.npos;
}

}  // namespace

// No comments are left for the library to find; no text has this character.
ConfigFile::ConfigFile() { comment('\x01'); }

std::vector<CLI::ConfigItem> ConfigFile::from_config(std::istream& input) const {
  std::stringstream text;
  for (std::string line; std::getline(input, line);) text << WithoutComment(line) << '\n';
  return ConfigBase::from_config(text);
}

std::string ConfigFile::Check(const std::string& path) {
  const absl::StatusOr<std::string> text = ReadRegularFile(path, kMaxBytes);
  if (!text.ok()) return std::string(text.status().message());
  std::istringstream lines(*text);
  int number = 1;
  for (std::string line; std::getline(lines, line); ++number) {
    line = WithoutComment(line);
    if (!LacksValue(line)) continue;
    return absl::StrCat(path, " line ", number, ": ", CLI::detail::trim_copy(line),
                        " has no value; \"\" is an empty text");
  }
  return "";
}

}  // namespace writescope::server
