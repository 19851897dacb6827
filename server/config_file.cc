#include "server/config_file.h"

#include <cstdint>
#include <sstream>
#include <string>
#include <string_view>

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

// Editors of other systems put it in front of a text.
constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf";

// The next line, without comment and byte order mark.
bool NextLine(std::istream& input, std::string* line) {
  const bool is_first = input.tellg() == 0;
  if (!std::getline(input, *line)) return false;
  if (is_first && line->starts_with(kByteOrderMark)) line->erase(0, kByteOrderMark.size());
  *line = WithoutComment(*line);
  return true;
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
  for (std::string line; NextLine(input, &line);) text << line << '\n';
  return ConfigBase::from_config(text);
}

std::string ConfigFile::Check(const std::string& path) {
  const absl::StatusOr<std::string> text = ReadRegularFile(path, kMaxBytes);
  if (!text.ok()) return std::string(text.status().message());
  std::istringstream lines(*text);
  int number = 1;
  for (std::string line; NextLine(lines, &line); ++number) {
    const std::string trimmed = CLI::detail::trim_copy(line);
    const auto wrong = [&](std::string_view what) {
      return absl::StrCat(path, " line ", number, ": ", trimmed, " ", std::string(what));
    };
    if (trimmed.starts_with('[')) return wrong("begins a section, and there are none");
    if (LacksValue(line)) return wrong("has no value; \"\" is an empty text");
  }
  return "";
}

std::string ConfigFile::Explain(const std::string& error) {
  constexpr std::string_view kUnknownKey = "INI was not able to parse ";
  if (!error.starts_with(kUnknownKey)) return error;
  return absl::StrCat("--config: the file's key '", error.substr(kUnknownKey.size()),
                      "' is no flag; --print-config shows all keys");
}

}  // namespace writescope::server
