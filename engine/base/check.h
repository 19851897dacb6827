// CHECK and DCHECK: a promise of our own that does not hold ends the process with the place and
// the values. Input from a caller is never CHECKed; it is answered with an absl::Status.
#pragma once

#if __has_include("absl/log/check.h")
#include "absl/log/check.h"  // IWYU pragma: export
#else

#include <sstream>

namespace writescope::internal {

// Collects the message of a failed check; its destructor prints it and aborts.
class CheckFailure {
 public:
  CheckFailure(const char* file, int line, const char* condition);
  CheckFailure(const CheckFailure&) = delete;
  CheckFailure& operator=(const CheckFailure&) = delete;
  [[noreturn]] ~CheckFailure();
  std::ostream& stream() { return stream_; }

 private:
  std::ostringstream stream_;
};

// Gives both arms of CHECK's ternary the type void, with a precedence below operator<<.
struct Voidify {
  void operator&(std::ostream&) const {}
};

}  // namespace writescope::internal

#define CHECK(condition)                            \
  (condition) ? (void)0                             \
              : ::writescope::internal::Voidify() & \
                    ::writescope::internal::CheckFailure(__FILE__, __LINE__, #condition).stream()
#define WRITESCOPE_CHECK_OP(a, op, b) CHECK((a)op(b)) << "(" << (a) << " vs. " << (b) << ") "
#define CHECK_EQ(a, b) WRITESCOPE_CHECK_OP(a, ==, b)
#define CHECK_NE(a, b) WRITESCOPE_CHECK_OP(a, !=, b)
#define CHECK_LT(a, b) WRITESCOPE_CHECK_OP(a, <, b)
#define CHECK_LE(a, b) WRITESCOPE_CHECK_OP(a, <=, b)
#define CHECK_GT(a, b) WRITESCOPE_CHECK_OP(a, >, b)
#define CHECK_GE(a, b) WRITESCOPE_CHECK_OP(a, >=, b)

#ifdef NDEBUG
#define DCHECK(condition) CHECK(true || (condition))
#else
#define DCHECK(condition) CHECK(condition)
#endif

#endif
