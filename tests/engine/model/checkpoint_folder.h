// The golden checkpoints, and copies of them that a test may damage.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "engine/model/config.h"
#include "engine/model/safetensors.h"
#include "engine/model/weights.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/support/safetensors_writer.h"
#include "tests/support/temp_dir.h"

namespace writescope::model {

inline const std::vector<std::string> kGoldens{"mixtral", "qwen3_moe", "qwen3_moe_dense0",
                                               "deepseek_v2_plain", "deepseek_v2_yarn"};

inline std::string GoldenDir(const std::string& name) {
  return WRITESCOPE_TESTDATA_DIR "/goldens/" + name;
}

inline std::vector<testing_support::TensorToWrite> TensorsOf(const std::string& path) {
  const absl::StatusOr<SafetensorsFile> file = SafetensorsFile::Open(path);
  EXPECT_TRUE(file.ok()) << file.status();
  std::vector<testing_support::TensorToWrite> tensors;
  for (const TensorView& view : file->tensors()) {
    tensors.push_back(
        {view.name, DtypeName(view.dtype), view.shape,
         std::string(reinterpret_cast<const char*>(view.bytes.data()), view.bytes.size())});
  }
  return tensors;
}

// A golden checkpoint in a folder of its own, to be damaged.
class Folder {
 public:
  explicit Folder(const std::string& golden)
      : tensors(TensorsOf(GoldenDir(golden) + "/model.safetensors")) {
    testing_support::WriteFile(dir.File("config.json"),
                               testing_support::ReadFile(GoldenDir(golden) + "/config.json"));
  }

  void WriteSingle() {
    testing_support::WriteFile(dir.File("model.safetensors"),
                               testing_support::SafetensorsBytes(tensors));
  }

  // The first half of the tensors in one shard, the rest in another.
  void WriteShards() {
    const auto middle = tensors.begin() + static_cast<std::ptrdiff_t>(tensors.size() / 2);
    WriteShard(kFirst, {tensors.begin(), middle});
    WriteShard(kSecond, {middle, tensors.end()});
    WriteIndex();
  }
  void WriteIndex() {
    testing_support::WriteFile(dir.File("model.safetensors.index.json"), index.dump());
  }

  testing_support::TensorToWrite& Tensor(const std::string& name) {
    for (testing_support::TensorToWrite& tensor : tensors) {
      if (tensor.name == name) return tensor;
    }
    ADD_FAILURE() << "no tensor " << name;
    return tensors.front();
  }
  void Drop(const std::string& name) {
    const size_t before = tensors.size();
    std::erase_if(tensors, [&](const testing_support::TensorToWrite& t) { return t.name == name; });
    EXPECT_EQ(tensors.size(), before - 1) << name;
  }

  absl::StatusOr<ModelWeights> Load() {
    absl::StatusOr<ModelConfig> config = ReadModelConfig(dir.path());
    if (!config.ok()) return config.status();
    return LoadWeights(dir.path(), *config);
  }

  void ExpectRefused(absl::StatusCode code, const std::vector<std::string>& in_message) {
    const absl::Status status = Load().status();
    EXPECT_EQ(status.code(), code) << status;
    for (const std::string& part : in_message) {
      EXPECT_THAT(std::string(status.message()), testing::HasSubstr(part));
    }
  }

  static constexpr char kFirst[] = "model-00001-of-00002.safetensors";
  static constexpr char kSecond[] = "model-00002-of-00002.safetensors";

  testing_support::TempDir dir;
  std::vector<testing_support::TensorToWrite> tensors;
  nlohmann::json index;

 private:
  void WriteShard(const char* name, const std::vector<testing_support::TensorToWrite>& shard) {
    testing_support::WriteFile(dir.File(name), testing_support::SafetensorsBytes(shard));
    for (const testing_support::TensorToWrite& tensor : shard) {
      index["weight_map"][tensor.name] = name;
      total_bytes_ += tensor.bytes.size();
    }
    index["metadata"]["total_size"] = total_bytes_;
  }
  size_t total_bytes_ = 0;
};

}  // namespace writescope::model
