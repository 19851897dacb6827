// All weight files of a model folder: model.safetensors.index.json with its shards, or one
// model.safetensors. The index is the truth: file and index must agree in both directions.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "engine/model/mapped_file.h"
#include "engine/model/safetensors.h"

namespace writescope::model {

// Thread-safe: it never changes. Views point into the mappings and live as long as the object,
// through moves.
class Checkpoint {
 public:
  Checkpoint() = default;  // Of no files
  // NotFound names a missing file; InvalidArgument and DataLoss say what is wrong with which.
  static absl::StatusOr<Checkpoint> Open(const std::string& model_dir);

  const std::string& model_dir() const { return model_dir_; }
  // File by file, in the order of their bytes.
  const std::vector<TensorView>& tensors() const { return tensors_; }
  // Null if there is none of the name.
  const TensorView* Find(const std::string& name) const;
  size_t num_files() const { return files_.size(); }
  // What is odd but does no harm: a .safetensors file that is no part of the checkpoint, a total
  // size in the index that is not the tensors' size.
  const std::vector<std::string>& warnings() const { return warnings_; }

 private:
  using WeightMap = std::vector<std::pair<std::string, std::string>>;  // Tensor, file.

  explicit Checkpoint(std::string model_dir) : model_dir_(std::move(model_dir)) {}
  absl::Status AddFile(const std::string& file_name);
  absl::Status AddIndexed(const std::string& index_path);
  absl::Status CheckAgainstIndex(const WeightMap& weight_map) const;

  std::string model_dir_;
  std::vector<MappedFile> files_;
  std::vector<std::string> file_names_;  // Beside files_; relative to the folder.
  std::vector<TensorView> tensors_;
  absl::flat_hash_map<std::string, size_t> by_name_;  // Position in tensors_.
  std::vector<std::string> file_of_tensor_;           // Beside tensors_.
  std::vector<std::string> warnings_;
};

}  // namespace writescope::model
