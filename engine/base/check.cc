#include "engine/base/check.h"

#include <cstdio>
#include <cstdlib>

#if !__has_include("absl/log/check.h")
namespace writescope::internal {

CheckFailure::CheckFailure(const char* file, int line, const char* condition) {
  stream_ << file << ":" << line << ": check failed: " << condition << " ";
}

CheckFailure::~CheckFailure() {
  std::fprintf(stderr, "%s\n", stream_.str().c_str());
  std::fflush(stderr);
  std::abort();
}

}  // namespace writescope::internal
#endif
