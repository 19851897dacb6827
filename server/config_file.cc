#include "server/config_file.h"

#include <sstream>
#include <string>

namespace writescope::server {
namespace {

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

}  // namespace

// No comments are left for the library to find; no text has this character.
ConfigFile::ConfigFile() { comment('\x01'); }

std::vector<CLI::ConfigItem> ConfigFile::from_config(std::istream& input) const {
  std::stringstream text;
  for (std::string line; std::getline(input, line);) text << WithoutComment(line) << '\n';
  return ConfigBase::from_config(text);
}

}  // namespace writescope::server
