// Regular files, opened so that nothing else can make the caller wait: a FIFO in a file's place is
// an error, not a wait for its writer.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/statusor.h"

namespace writescope {

// An open file; closed with its last owner.
class RegularFile {
 public:
  // NotFound when there is none at `path`; FailedPrecondition when it cannot be opened or is
  // something else than a regular file.
  static absl::StatusOr<RegularFile> Open(const std::string& path);

  RegularFile(RegularFile&& other) noexcept
      : fd_(std::exchange(other.fd_, -1)), size_bytes_(other.size_bytes_) {}
  RegularFile& operator=(RegularFile&&) = delete;
  ~RegularFile();

  int fd() const { return fd_; }
  int64_t size_bytes() const { return size_bytes_; }

 private:
  RegularFile(int fd, int64_t size_bytes) : fd_(fd), size_bytes_(size_bytes) {}

  int fd_;
  int64_t size_bytes_;
};

// The whole of it. Errors of Open; InvalidArgument for more than max_bytes, DataLoss when less
// comes than its size.
absl::StatusOr<std::string> ReadRegularFile(const std::string& path, int64_t max_bytes);

}  // namespace writescope
