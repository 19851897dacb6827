// A file mapped read-only. The bytes stay where they are for the object's life, moves included.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "absl/status/statusor.h"

namespace writescope::model {

// Thread-safe: it never changes. A file that another process cuts short while it is mapped raises
// SIGBUS on access; nothing in the process can prevent that.
class MappedFile {
 public:
  // NotFound if it does not exist; FailedPrecondition if it is no regular file or cannot be mapped.
  static absl::StatusOr<MappedFile> Open(const std::string& path);
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  std::span<const std::byte> bytes() const { return bytes_; }
  const std::string& path() const { return path_; }

 private:
  MappedFile(std::string path, std::span<const std::byte> bytes);
  void Unmap();

  std::string path_;
  std::span<const std::byte> bytes_;  // Empty for an empty file and after a move.
};

}  // namespace writescope::model
