#include "engine/model/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "engine/base/log.h"

namespace writescope::model {

absl::StatusOr<MappedFile> MappedFile::Open(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    const std::string message = absl::StrCat("cannot open ", path, ": ", std::strerror(errno));
    return errno == ENOENT ? absl::NotFoundError(message) : absl::FailedPreconditionError(message);
  }
  const auto close_fd = absl::MakeCleanup([fd] { close(fd); });  // The mapping outlives it.
  struct stat info;
  if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    return absl::FailedPreconditionError(absl::StrCat(path, " is not a regular file"));
  }
  const size_t size_bytes = static_cast<size_t>(info.st_size);
  if (size_bytes == 0) return MappedFile(path, {});
  void* data = mmap(nullptr, size_bytes, PROT_READ, MAP_PRIVATE, fd, 0);
  if (data == MAP_FAILED) {
    return absl::FailedPreconditionError(
        absl::StrCat("cannot map ", size_bytes, " bytes of ", path, ": ", std::strerror(errno)));
  }
  return MappedFile(path, {static_cast<const std::byte*>(data), size_bytes});
}

MappedFile::MappedFile(std::string path, std::span<const std::byte> bytes)
    : path_(std::move(path)), bytes_(bytes) {}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)), bytes_(std::exchange(other.bytes_, {})) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  if (this != &other) {
    Unmap();
    path_ = std::move(other.path_);
    bytes_ = std::exchange(other.bytes_, {});
  }
  return *this;
}

MappedFile::~MappedFile() { Unmap(); }

void MappedFile::Unmap() {
  if (bytes_.empty()) return;
  if (munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size()) != 0) {
    Log(LogLevel::kWarning, "cannot unmap a file", {{"path", path_}, {"bytes", bytes_.size()}});
  }
  bytes_ = {};
}

}  // namespace writescope::model
