#include "engine/model/mapped_file.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "engine/base/log.h"
#include "engine/base/regular_file.h"
#include "engine/base/status_macros.h"

namespace writescope::model {

absl::StatusOr<MappedFile> MappedFile::Open(const std::string& path) {
  // The mapping outlives it.
  ASSIGN_OR_RETURN(const RegularFile file, RegularFile::Open(path));
  const size_t size_bytes = static_cast<size_t>(file.size_bytes());
  if (size_bytes == 0) return MappedFile(path, {});
  void* data = mmap(nullptr, size_bytes, PROT_READ, MAP_PRIVATE, file.fd(), 0);
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
