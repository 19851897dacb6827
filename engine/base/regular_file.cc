#include "engine/base/regular_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "engine/base/status_macros.h"

namespace writescope {

absl::StatusOr<RegularFile> RegularFile::Open(const std::string& path) {
  // Without O_NONBLOCK a FIFO is only open once somebody writes to it. It changes nothing for
  // files.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) {
    const int error = errno;  // What follows allocates, which may change it.
    const std::string message = absl::StrCat("cannot open ", path, ": ", std::strerror(error));
    return error == ENOENT ? absl::NotFoundError(message) : absl::FailedPreconditionError(message);
  }
  struct stat info = {};
  const bool regular = fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
  RegularFile file(fd, info.st_size);
  if (!regular) return absl::FailedPreconditionError(absl::StrCat(path, " is not a regular file"));
  return file;
}

RegularFile::~RegularFile() {
  if (fd_ >= 0) close(fd_);
}

absl::StatusOr<std::string> ReadRegularFile(const std::string& path, int64_t max_bytes) {
  ASSIGN_OR_RETURN(const RegularFile file, RegularFile::Open(path));
  if (file.size_bytes() > max_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, " has ", file.size_bytes(), " bytes; at most ", max_bytes, " are read"));
  }
  std::string text(static_cast<size_t>(file.size_bytes()), '\0');
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t count = read(file.fd(), text.data() + done, text.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) {
      return absl::DataLossError(absl::StrCat("cannot read ", path, " at byte ", done, " of ",
                                              text.size(), ": ", std::strerror(errno)));
    }
    if (count == 0) {
      return absl::DataLossError(
          absl::StrCat(path, " ended after ", done, " of ", text.size(), " bytes"));
    }
    done += static_cast<size_t>(count);
  }
  return text;
}

}  // namespace writescope
