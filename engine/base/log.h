// Structured logs on stderr: one line a message, key=value fields behind it.
//   Log(LogLevel::kInfo, "request finished", {{"request_id", id}, {"tokens", 17}});
#pragma once

#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>

#include "absl/strings/str_cat.h"

namespace writescope {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

struct LogField {
  template <typename T>
  LogField(std::string_view key, const T& value) : key(key), value(absl::StrCat(value)) {}
  std::string_view key;
  std::string value;
};

// Thread-safe; a line is written whole. A value with spaces, quotes or control characters is
// quoted; broken UTF-8 becomes U+FFFD. Of a value of more than 4 KiB the beginning is logged.
//
// Does not wait: where stderr is a pipe whose reader has stopped, lines are dropped, and their
// number is logged once it reads on.
void Log(LogLevel level, std::string_view message, std::initializer_list<LogField> fields = {});

// Messages below the level are dropped; the start value is kInfo.
void SetLogLevel(LogLevel level);
// "debug", "info", "warning", "error".
const char* LogLevelName(LogLevel level);
// The level of such a name; anything else gives nothing.
std::optional<LogLevel> ParseLogLevel(std::string_view name);

}  // namespace writescope
