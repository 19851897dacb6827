#include "engine/base/log.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>
#include <mutex>

#include "absl/strings/escaping.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "engine/base/utf8.h"

namespace writescope {
namespace {

std::atomic<LogLevel> min_level{LogLevel::kInfo};

// Values may be a client's words, of any length.
constexpr size_t kMaxValueBytes = 4096;

std::string WholeValue(const std::string& value) {
  if (value.size() <= kMaxValueBytes) return RepairUtf8(value);
  return absl::StrCat(RepairUtf8(value.substr(0, kMaxValueBytes)), "... (", value.size(),
                      " bytes)");
}

bool NeedsQuotes(std::string_view value) {
  if (value.empty()) return true;
  for (const char c : value) {
    if (static_cast<unsigned char>(c) <= ' ' || c == '"' || c == '=' || c == '\\' || c == 0x7f) {
      return true;
    }
  }
  return false;
}

bool HasControls(std::string_view text) {
  return std::any_of(text.begin(), text.end(),
                     [](char c) { return static_cast<unsigned char>(c) < ' ' || c == 0x7f; });
}

std::string LineBegin(LogLevel level) {
  return absl::StrCat(absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", absl::Now(), absl::UTCTimeZone()),
                      " ", LogLevelName(level), " ");
}

// What stderr takes of lines at once. The thread that logs may be the one that computes.
class ErrorStream {
 public:
  void Write(std::string_view line) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (dropped_lines_ > 0) {
      const std::string note =
          absl::StrCat(cut_ ? "\n" : "", LineBegin(LogLevel::kWarning),
                       "nobody read the log, lines were dropped lines=", dropped_lines_, "\n");
      if (!WriteAtOnce(note)) {
        ++dropped_lines_;
        return;
      }
      dropped_lines_ = 0;
    }
    if (!WriteAtOnce(line)) ++dropped_lines_;
  }

 private:
  // With the mutex held. In parts that a pipe with room takes without waiting; a write that fails
  // is forgotten.
  bool WriteAtOnce(std::string_view text) {
    for (bool first = true; !text.empty(); first = false) {
      pollfd room = {STDERR_FILENO, POLLOUT, 0};
      if (poll(&room, 1, 0) == 0) {
        cut_ = cut_ || !first;
        return false;
      }
      const ssize_t count =
          write(STDERR_FILENO, text.data(), std::min<size_t>(text.size(), PIPE_BUF));
      if (count <= 0) break;
      text.remove_prefix(static_cast<size_t>(count));
    }
    cut_ = false;
    return true;
  }

  std::mutex mutex_;  // Of all below, and of the order of lines
  int64_t dropped_lines_ = 0;
  bool cut_ = false;  // The last line that came out lacks its end.
};

}  // namespace

void Log(LogLevel level, std::string_view message, std::initializer_list<LogField> fields) {
  if (level < min_level.load(std::memory_order_relaxed)) return;
  std::string line = LineBegin(level);
  const std::string whole_message = RepairUtf8(message);
  absl::StrAppend(
      &line, HasControls(whole_message) ? absl::Utf8SafeCEscape(whole_message) : whole_message);
  for (const LogField& field : fields) {
    const std::string value = WholeValue(field.value);
    absl::StrAppend(&line, " ", std::string(field.key), "=");
    if (NeedsQuotes(value)) {
      absl::StrAppend(&line, "\"", absl::Utf8SafeCEscape(value), "\"");
    } else {
      absl::StrAppend(&line, value);
    }
  }
  line.push_back('\n');
  // Never destroyed: threads may log while the process ends.
  static auto* const error_stream = new ErrorStream();
  error_stream->Write(line);
}

void SetLogLevel(LogLevel level) { min_level.store(level, std::memory_order_relaxed); }

const char* LogLevelName(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return "debug";
    case LogLevel::kInfo:
      return "info";
    case LogLevel::kWarning:
      return "warning";
    case LogLevel::kError:
      return "error";
  }
  return "unknown";
}

std::optional<LogLevel> ParseLogLevel(std::string_view name) {
  for (const LogLevel level :
       {LogLevel::kDebug, LogLevel::kInfo, LogLevel::kWarning, LogLevel::kError}) {
    if (name == LogLevelName(level)) return level;
  }
  return std::nullopt;
}

}  // namespace writescope
