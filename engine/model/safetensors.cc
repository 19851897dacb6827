#include "engine/model/safetensors.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/base/check.h"
#include "engine/base/status_macros.h"
#include "engine/model/json_reader.h"
#include "nlohmann/json.hpp"

namespace writescope::model {
namespace {

constexpr size_t kLengthBytes = 8;
constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // The format's own limit.

struct DtypeInfo {
  const char* name;
  Dtype dtype;
  int bytes;
};
constexpr DtypeInfo kDtypes[] = {
    {"BOOL", Dtype::kBool, 1},      {"U8", Dtype::kU8, 1},          {"I8", Dtype::kI8, 1},
    {"F8_E4M3", Dtype::kF8E4M3, 1}, {"F8_E5M2", Dtype::kF8E5M2, 1}, {"F8_E8M0", Dtype::kF8E8M0, 1},
    {"U16", Dtype::kU16, 2},        {"I16", Dtype::kI16, 2},        {"F16", Dtype::kF16, 2},
    {"BF16", Dtype::kBF16, 2},      {"U32", Dtype::kU32, 4},        {"I32", Dtype::kI32, 4},
    {"F32", Dtype::kF32, 4},        {"U64", Dtype::kU64, 8},        {"I64", Dtype::kI64, 8},
    {"F64", Dtype::kF64, 8},
};

const DtypeInfo& InfoOf(Dtype dtype) {
  for (const DtypeInfo& info : kDtypes) {
    if (info.dtype == dtype) return info;
  }
  CHECK(false) << "dtype " << static_cast<int>(dtype);
  return kDtypes[0];
}

// One header entry, before it is tied to the file's bytes.
struct Entry {
  std::string name;
  Dtype dtype;
  std::vector<int64_t> shape;
  uint64_t begin;
  uint64_t end;
};

// The header's text, once its length is known to lie within the file.
absl::StatusOr<std::string_view> HeaderText(std::span<const std::byte> file,
                                            const std::string& where) {
  const std::string_view text(reinterpret_cast<const char*>(file.data()), file.size());
  if (text.starts_with("version https://git-lfs")) {
    return absl::InvalidArgumentError(absl::StrCat(where, " is a Git LFS pointer of ", file.size(),
                                                   " bytes, not the weights; run git lfs pull"));
  }
  if (file.size() < kLengthBytes) {
    return absl::DataLossError(absl::StrCat(
        where, " has ", file.size(), " bytes; a safetensors file has at least ", kLengthBytes));
  }
  uint64_t header_bytes;
  std::memcpy(&header_bytes, file.data(), kLengthBytes);
  if (header_bytes > kMaxHeaderBytes) {
    return absl::InvalidArgumentError(absl::StrCat(where, " claims a header of ", header_bytes,
                                                   " bytes; at most ", kMaxHeaderBytes,
                                                   " are allowed, so it is no safetensors file"));
  }
  if (header_bytes > file.size() - kLengthBytes) {
    return absl::DataLossError(absl::StrCat(where, " is truncated: its header ends at byte ",
                                            kLengthBytes + header_bytes, ", the file at byte ",
                                            file.size()));
  }
  return text.substr(kLengthBytes, header_bytes);
}

absl::StatusOr<uint64_t> Unsigned(const nlohmann::json& value, const std::string& where) {
  if (!value.is_number_unsigned()) {
    return absl::InvalidArgumentError(absl::StrCat(where, " holds ", DescribeJson(value),
                                                   "; it must hold integers of 0 or more"));
  }
  return value.get<uint64_t>();
}

absl::StatusOr<Entry> ReadEntry(const std::string& name, const nlohmann::json& value,
                                const std::string& where) {
  const std::string tensor = absl::StrCat(where, ": tensor \"", absl::Utf8SafeCEscape(name), "\"");
  ASSIGN_OR_RETURN(const JsonObject object, JsonObject::Create(value, tensor));
  ASSIGN_OR_RETURN(const std::string dtype_name, object.StringOr({"dtype"}, ""));
  const std::optional<Dtype> dtype = ParseDtype(dtype_name);
  if (!dtype) {
    return absl::InvalidArgumentError(absl::StrCat(
        tensor, " has dtype \"", absl::Utf8SafeCEscape(dtype_name), "\", which is not known"));
  }
  const auto shape_it = value.find("shape");
  const auto offsets_it = value.find("data_offsets");
  if (shape_it == value.end() || !shape_it->is_array()) {
    return absl::InvalidArgumentError(absl::StrCat(tensor, " has no list \"shape\""));
  }
  if (offsets_it == value.end() || !offsets_it->is_array() || offsets_it->size() != 2) {
    return absl::InvalidArgumentError(absl::StrCat(tensor, " has no pair \"data_offsets\""));
  }
  Entry entry{name, *dtype, {}, 0, 0};
  ASSIGN_OR_RETURN(entry.begin, Unsigned((*offsets_it)[0], tensor + " data_offsets"));
  ASSIGN_OR_RETURN(entry.end, Unsigned((*offsets_it)[1], tensor + " data_offsets"));
  int64_t size_bytes = DtypeBytes(*dtype);
  for (const nlohmann::json& item : *shape_it) {
    ASSIGN_OR_RETURN(const uint64_t dim, Unsigned(item, tensor + " shape"));
    entry.shape.push_back(static_cast<int64_t>(dim));
    if (dim > INT64_MAX ||
        __builtin_mul_overflow(size_bytes, static_cast<int64_t>(dim), &size_bytes)) {
      return absl::InvalidArgumentError(absl::StrCat(tensor, " has a shape of 2^63 bytes or more"));
    }
  }
  if (entry.begin > entry.end || entry.end - entry.begin != static_cast<uint64_t>(size_bytes)) {
    return absl::InvalidArgumentError(absl::StrCat(
        tensor, " has data_offsets [", entry.begin, ", ", entry.end, "), but shape ",
        ShapeString(entry.shape), " of ", dtype_name, " takes ", size_bytes, " bytes"));
  }
  return entry;
}

absl::StatusOr<std::vector<Entry>> ReadHeader(std::string_view text, const std::string& where) {
  ASSIGN_OR_RETURN(const nlohmann::json header, ParseJson(text, absl::StrCat(where, ": header")));
  if (!header.is_object()) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, ": header is ", DescribeJson(header), "; it must be an object"));
  }
  std::vector<Entry> entries;
  for (const auto& [name, value] : header.items()) {
    if (name == "__metadata__") continue;
    if (name.empty()) {
      return absl::InvalidArgumentError(absl::StrCat(where, ": a tensor has an empty name"));
    }
    ASSIGN_OR_RETURN(Entry entry, ReadEntry(name, value, where));
    entries.push_back(std::move(entry));
  }
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  return entries;
}

// Tensors must follow each other without gap or overlap and end where the data ends.
absl::Status CheckLayout(const std::vector<Entry>& entries, uint64_t data_bytes,
                         uint64_t file_bytes, const std::string& where) {
  uint64_t covered = 0;
  const Entry* previous = nullptr;
  for (const Entry& entry : entries) {
    if (entry.begin != covered) {
      const std::string before =
          previous == nullptr
              ? "the data begins"
              : absl::StrCat("tensor \"", absl::Utf8SafeCEscape(previous->name), "\" ends");
      return absl::InvalidArgumentError(
          absl::StrCat(where, ": tensor \"", absl::Utf8SafeCEscape(entry.name),
                       "\" begins at data byte ", entry.begin, ", but ", before, " at ", covered,
                       entry.begin < covered ? " (overlap)" : " (gap)"));
    }
    covered = entry.end;
    previous = &entry;
  }
  if (covered > data_bytes) {
    return absl::DataLossError(absl::StrCat(where, " is truncated: it has ", file_bytes,
                                            " bytes, but its header describes ",
                                            file_bytes - data_bytes + covered));
  }
  if (covered < data_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(where, " has ", file_bytes,
                                                   " bytes, but its header describes only ",
                                                   file_bytes - data_bytes + covered));
  }
  return absl::OkStatus();
}

}  // namespace

const char* DtypeName(Dtype dtype) { return InfoOf(dtype).name; }
int DtypeBytes(Dtype dtype) { return InfoOf(dtype).bytes; }

std::optional<Dtype> ParseDtype(const std::string& name) {
  for (const DtypeInfo& info : kDtypes) {
    if (name == info.name) return info.dtype;
  }
  return std::nullopt;
}

int64_t TensorView::num_elements() const {
  int64_t elements = 1;
  for (const int64_t dim : shape) elements *= dim;
  return elements;
}

std::string ShapeString(const std::vector<int64_t>& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

absl::StatusOr<std::vector<TensorView>> ParseSafetensors(std::span<const std::byte> file,
                                                         const std::string& where) {
  ASSIGN_OR_RETURN(const std::string_view text, HeaderText(file, where));
  ASSIGN_OR_RETURN(const std::vector<Entry> entries, ReadHeader(text, where));
  const std::span<const std::byte> data = file.subspan(kLengthBytes + text.size());
  RETURN_IF_ERROR(CheckLayout(entries, data.size(), file.size(), where));
  std::vector<TensorView> tensors;
  tensors.reserve(entries.size());
  for (const Entry& entry : entries) {
    tensors.push_back(
        {entry.dtype, entry.shape, data.subspan(entry.begin, entry.end - entry.begin), entry.name});
  }
  return tensors;
}

absl::StatusOr<SafetensorsFile> SafetensorsFile::Open(const std::string& path) {
  ASSIGN_OR_RETURN(MappedFile file, MappedFile::Open(path));
  ASSIGN_OR_RETURN(std::vector<TensorView> tensors, ParseSafetensors(file.bytes(), path));
  return SafetensorsFile(std::move(file), std::move(tensors));
}

const TensorView* SafetensorsFile::Find(const std::string& name) const {
  for (const TensorView& tensor : tensors_) {
    if (tensor.name == name) return &tensor;
  }
  return nullptr;
}

}  // namespace writescope::model
