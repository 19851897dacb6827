// civetweb, which serves the metrics, asks for threads with 100 KiB of stack. glibc takes every
// library's thread-local storage out of that: 60 KiB for OpenBLAS and up to 8 KiB for the CUDA
// runtime, and what is left does not hold the buffers of one answer. So a request for a small stack
// is raised here. The program's definition comes before that of the C library, which it calls.
#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <cstddef>

namespace {

constexpr size_t kSmallestStackBytes = size_t{1} << 20;

}  // namespace

extern "C" __attribute__((visibility("default"), used)) int pthread_attr_setstacksize(
    pthread_attr_t* attributes, size_t stack_bytes) noexcept {
  using Call = int (*)(pthread_attr_t*, size_t);
  static const Call next = reinterpret_cast<Call>(dlsym(RTLD_NEXT, "pthread_attr_setstacksize"));
  return next(attributes, std::max(stack_bytes, kSmallestStackBytes));
}
