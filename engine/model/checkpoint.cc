#include "engine/model/checkpoint.h"

#include <algorithm>
#include <filesystem>
#include <set>
#include <system_error>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/base/regular_file.h"
#include "engine/base/status_macros.h"
#include "engine/base/units.h"
#include "engine/model/json_reader.h"
#include "nlohmann/json.hpp"

namespace writescope::model {
namespace {

constexpr char kSingleFile[] = "model.safetensors";
constexpr char kIndexFile[] = "model.safetensors.index.json";
constexpr int64_t kMaxIndexBytes = 512 * kMiB;

// A relative path without a step outwards. Symbolic links are followed: download caches use them.
bool StaysInside(const std::string& file_name) {
  const std::filesystem::path path(file_name);
  if (file_name.empty() || path.is_absolute() || file_name.find('\0') != std::string::npos) {
    return false;
  }
  return std::none_of(path.begin(), path.end(), [](const std::filesystem::path& part) {
    return part == ".." || part == "." || part.empty();
  });
}

// The .safetensors files right in the folder, sorted.
absl::StatusOr<std::set<std::string>> WeightFilesIn(const std::string& model_dir) {
  std::error_code error;
  std::set<std::string> names;
  std::filesystem::directory_iterator it(model_dir, error);
  for (; !error && it != std::filesystem::directory_iterator(); it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (absl::EndsWith(name, ".safetensors")) names.insert(name);
  }
  if (!error) return names;
  const std::string message =
      absl::StrCat("cannot list the model folder ", model_dir, ": ", error.message());
  return error == std::errc::no_such_file_or_directory ? absl::NotFoundError(message)
                                                       : absl::FailedPreconditionError(message);
}

}  // namespace

absl::StatusOr<Checkpoint> Checkpoint::Open(const std::string& model_dir) {
  ASSIGN_OR_RETURN(const std::set<std::string> present, WeightFilesIn(model_dir));
  Checkpoint checkpoint(model_dir);
  std::error_code error;
  const std::string index_path = absl::StrCat(model_dir, "/", kIndexFile);
  if (std::filesystem::exists(index_path, error)) {
    RETURN_IF_ERROR(checkpoint.AddIndexed(index_path));
  } else if (present.count(kSingleFile) > 0) {
    RETURN_IF_ERROR(checkpoint.AddFile(kSingleFile));
  } else {
    return absl::NotFoundError(absl::StrCat(
        model_dir, " holds neither ", kSingleFile, " nor ", kIndexFile,
        "; its .safetensors files: ", present.empty() ? "none" : absl::StrJoin(present, ", ")));
  }
  std::set<std::string> stray = present;
  for (const std::string& name : checkpoint.file_names_) stray.erase(name);
  for (const std::string& name : stray) {
    checkpoint.warnings_.push_back(
        absl::StrCat(model_dir, "/", name, " is no part of the checkpoint and is not read"));
  }
  return checkpoint;
}

absl::Status Checkpoint::AddFile(const std::string& file_name) {
  const std::string path = absl::StrCat(model_dir_, "/", file_name);
  ASSIGN_OR_RETURN(MappedFile file, MappedFile::Open(path));
  ASSIGN_OR_RETURN(std::vector<TensorView> tensors, ParseSafetensors(file.bytes(), path));
  files_.push_back(std::move(file));
  file_names_.push_back(file_name);
  for (TensorView& tensor : tensors) {
    const auto [it, inserted] = by_name_.try_emplace(tensor.name, tensors_.size());
    if (!inserted) {
      return absl::InvalidArgumentError(
          absl::StrCat(model_dir_, ": tensor \"", absl::Utf8SafeCEscape(tensor.name),
                       "\" is both in ", file_of_tensor_[it->second], " and in ", file_name));
    }
    tensors_.push_back(std::move(tensor));
    file_of_tensor_.push_back(file_name);
  }
  return absl::OkStatus();
}

absl::Status Checkpoint::AddIndexed(const std::string& index_path) {
  ASSIGN_OR_RETURN(const std::string text, ReadRegularFile(index_path, kMaxIndexBytes));
  ASSIGN_OR_RETURN(const nlohmann::json index, ParseJson(text, index_path));
  if (!index.is_object() || !index.contains("weight_map") || !index["weight_map"].is_object() ||
      index["weight_map"].empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(index_path, " has no object \"weight_map\" with entries"));
  }
  WeightMap weight_map;
  std::set<std::string> file_names;
  for (const auto& [tensor, file] : index["weight_map"].items()) {
    if (!file.is_string() || !StaysInside(file.get<std::string>())) {
      return absl::InvalidArgumentError(
          absl::StrCat(index_path, ": tensor \"", absl::Utf8SafeCEscape(tensor), "\" is in ",
                       DescribeJson(file), "; it must be a file inside the model folder"));
    }
    weight_map.emplace_back(tensor, file.get<std::string>());
    file_names.insert(file.get<std::string>());
  }
  std::vector<std::string> missing;
  for (const std::string& name : file_names) {
    std::error_code error;
    if (!std::filesystem::exists(absl::StrCat(model_dir_, "/", name), error)) {
      missing.push_back(name);
    }
  }
  if (!missing.empty()) {
    return absl::NotFoundError(absl::StrCat(index_path, " names ", file_names.size(),
                                            " files, of which ", missing.size(),
                                            " are missing: ", absl::StrJoin(missing, ", ")));
  }
  for (const std::string& name : file_names) RETURN_IF_ERROR(AddFile(name));
  RETURN_IF_ERROR(CheckAgainstIndex(weight_map));

  int64_t total_bytes = 0;
  for (const TensorView& tensor : tensors_) total_bytes += std::ssize(tensor.bytes);
  if (index.contains("metadata") && index["metadata"].is_object() &&
      index["metadata"].contains("total_size") && index["metadata"]["total_size"] != total_bytes) {
    warnings_.push_back(absl::StrCat(index_path, " says total_size ",
                                     DescribeJson(index["metadata"]["total_size"]),
                                     ", but its tensors have ", total_bytes, " bytes"));
  }
  return absl::OkStatus();
}

absl::Status Checkpoint::CheckAgainstIndex(const WeightMap& weight_map) const {
  absl::flat_hash_map<std::string, std::string> file_of(weight_map.begin(), weight_map.end());
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const auto it = file_of.find(tensors_[i].name);
    const std::string shown = absl::Utf8SafeCEscape(tensors_[i].name);
    if (it == file_of.end()) {
      return absl::InvalidArgumentError(absl::StrCat(model_dir_, "/", file_of_tensor_[i],
                                                     " holds tensor \"", shown,
                                                     "\", which the index does not list"));
    }
    if (it->second != file_of_tensor_[i]) {
      return absl::InvalidArgumentError(absl::StrCat(model_dir_, "/", file_of_tensor_[i],
                                                     " holds tensor \"", shown,
                                                     "\", which the index puts in ", it->second));
    }
  }
  for (const auto& [tensor, file] : weight_map) {
    if (!by_name_.contains(tensor)) {
      return absl::InvalidArgumentError(absl::StrCat("the index puts tensor \"",
                                                     absl::Utf8SafeCEscape(tensor), "\" in ",
                                                     model_dir_, "/", file, ", which lacks it"));
    }
  }
  return absl::OkStatus();
}

const TensorView* Checkpoint::Find(const std::string& name) const {
  const auto it = by_name_.find(name);
  return it == by_name_.end() ? nullptr : &tensors_[it->second];
}

}  // namespace writescope::model
