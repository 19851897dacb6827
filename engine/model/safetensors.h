// Reads one .safetensors file: 8 bytes of header length (little-endian), a JSON header, then the
// tensors' bytes without gaps. All that the header claims is checked against the file before any of
// it is used; nothing is copied.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/model/mapped_file.h"

namespace writescope::model {

enum class Dtype {
  kBool,
  kU8,
  kI8,
  kF8E4M3,
  kF8E5M2,
  kF8E8M0,
  kU16,
  kI16,
  kF16,
  kBF16,
  kU32,
  kI32,
  kF32,
  kU64,
  kI64,
  kF64,
};

// As safetensors spells it: "BF16".
const char* DtypeName(Dtype dtype);
int DtypeBytes(Dtype dtype);
// Nothing for a name that is not known.
std::optional<Dtype> ParseDtype(const std::string& name);

// A tensor inside a mapped file, or an empty view where a model has no such tensor.
struct TensorView {
  Dtype dtype = Dtype::kF32;
  std::vector<int64_t> shape;  // Row-major; none for a scalar.
  // Little-endian. It may start at any address, since a header has any length: read with memcpy or
  // through tensor_values.h.
  std::span<const std::byte> bytes;
  std::string name;

  bool present() const { return !name.empty(); }
  int64_t num_elements() const;
};

// "[4096, 2048]".
std::string ShapeString(const std::vector<int64_t>& shape);

// Checks a whole file's bytes; the views point into `file`. `where` stands in front of messages.
// Tensors come in the order of their bytes. InvalidArgument for a header that is wrong in itself,
// DataLoss where the file ends before what the header promises.
absl::StatusOr<std::vector<TensorView>> ParseSafetensors(std::span<const std::byte> file,
                                                         const std::string& where);

// A mapped file and the views into it. Thread-safe: it never changes.
class SafetensorsFile {
 public:
  static absl::StatusOr<SafetensorsFile> Open(const std::string& path);

  const std::vector<TensorView>& tensors() const { return tensors_; }
  // Null if there is none of the name.
  const TensorView* Find(const std::string& name) const;
  const std::string& path() const { return file_.path(); }

 private:
  SafetensorsFile(MappedFile file, std::vector<TensorView> tensors)
      : file_(std::move(file)), tensors_(std::move(tensors)) {}

  MappedFile file_;
  std::vector<TensorView> tensors_;
};

}  // namespace writescope::model
