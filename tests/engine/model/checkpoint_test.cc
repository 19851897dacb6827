// Checkpoint folders of one or several files: each way in which one can be wrong is named.
#include "engine/model/checkpoint.h"

#include <cstring>
#include <filesystem>
#include <random>
#include <string>

#include "engine/model/weights.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/model/checkpoint_folder.h"
#include "tests/support/safetensors_writer.h"
#include "tests/support/seed.h"

namespace writescope::model {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;
using testing_support::ReadFile;
using testing_support::SafetensorsBytes;
using testing_support::TensorToWrite;
using testing_support::WriteFile;

const auto kInvalid = absl::StatusCode::kInvalidArgument;
const auto kNotFound = absl::StatusCode::kNotFound;

TEST(Checkpoint, ShardsEqualOneFile) {
  for (const std::string& name : kGoldens) {
    Folder folder(name);
    folder.WriteShards();
    const absl::StatusOr<ModelWeights> weights = folder.Load();
    ASSERT_TRUE(weights.ok()) << weights.status();
    EXPECT_EQ(weights->checkpoint.num_files(), 2u);
    EXPECT_THAT(weights->checkpoint.warnings(), IsEmpty());
    for (const TensorToWrite& tensor : folder.tensors) {
      const TensorView* view = weights->checkpoint.Find(tensor.name);
      ASSERT_NE(view, nullptr) << tensor.name;
      ASSERT_EQ(view->bytes.size(), tensor.bytes.size());
      EXPECT_EQ(std::memcmp(view->bytes.data(), tensor.bytes.data(), tensor.bytes.size()), 0);
    }
  }
}

TEST(Checkpoint, OddFileNamesAreNoReasonToRefuse) {
  Folder folder("mixtral");
  folder.WriteShards();
  std::filesystem::create_directory(folder.dir.File("sub"));
  std::filesystem::rename(folder.dir.File(Folder::kFirst), folder.dir.File("sub/consolidated.st"));
  for (auto& [tensor, file] : folder.index["weight_map"].items()) {
    if (file == Folder::kFirst) file = "sub/consolidated.st";
  }
  folder.WriteIndex();
  EXPECT_TRUE(folder.Load().ok()) << folder.Load().status();
}

TEST(Checkpoint, TruncatedByOneByte) {
  Folder folder("mixtral");
  folder.WriteSingle();
  const std::string path = folder.dir.File("model.safetensors");
  const auto size = std::filesystem::file_size(path);
  std::filesystem::resize_file(path, size - 1);
  folder.ExpectRefused(absl::StatusCode::kDataLoss,
                       {path, "truncated", std::to_string(size), std::to_string(size - 1)});
}

TEST(Checkpoint, TruncatedShard) {
  Folder folder("mixtral");
  folder.WriteShards();
  std::filesystem::resize_file(folder.dir.File(Folder::kSecond), 100);
  folder.ExpectRefused(absl::StatusCode::kDataLoss, {Folder::kSecond, "truncated"});
}

TEST(Checkpoint, MissingFiles) {
  Folder folder("mixtral");
  folder.ExpectRefused(kNotFound, {"neither model.safetensors nor", "none"});
  folder.WriteShards();
  std::filesystem::remove(folder.dir.File(Folder::kFirst));
  folder.ExpectRefused(kNotFound, {"names 2 files", "1 are missing", Folder::kFirst});
  std::filesystem::remove(folder.dir.File("model.safetensors.index.json"));
  folder.ExpectRefused(kNotFound, {"neither model.safetensors nor", Folder::kSecond});

  const absl::StatusOr<ModelConfig> config = ReadModelConfig(GoldenDir("mixtral"));
  EXPECT_EQ(LoadWeights(folder.dir.File("nowhere"), *config).status().code(), kNotFound);
}

TEST(Checkpoint, StrayFileIsAWarning) {
  Folder folder("mixtral");
  folder.WriteShards();
  WriteFile(folder.dir.File("model-00003-of-00003.safetensors"), "never read");
  absl::StatusOr<ModelWeights> weights = folder.Load();
  ASSERT_TRUE(weights.ok()) << weights.status();
  ASSERT_THAT(weights->checkpoint.warnings(), SizeIs(1));
  EXPECT_THAT(weights->checkpoint.warnings()[0], HasSubstr("model-00003-of-00003.safetensors"));
  // The index is the truth even beside a whole model.safetensors.
  folder.WriteSingle();
  weights = folder.Load();
  ASSERT_TRUE(weights.ok()) << weights.status();
  EXPECT_THAT(weights->checkpoint.warnings(), SizeIs(2));
  EXPECT_EQ(weights->checkpoint.num_files(), 2u);
}

TEST(Checkpoint, WrongTotalSizeIsAWarning) {
  Folder folder("mixtral");
  folder.WriteShards();
  folder.index["metadata"]["total_size"] = 17;
  folder.WriteIndex();
  const absl::StatusOr<ModelWeights> weights = folder.Load();
  ASSERT_TRUE(weights.ok()) << weights.status();
  ASSERT_THAT(weights->checkpoint.warnings(), SizeIs(1));
  EXPECT_THAT(weights->checkpoint.warnings()[0], HasSubstr("total_size 17"));
}

TEST(Checkpoint, IndexAndShardsMustAgree) {
  const std::string norm = "model.norm.weight";
  {
    Folder folder("mixtral");  // The index names a tensor that its file lacks.
    folder.WriteShards();
    folder.index["weight_map"]["ghost.weight"] = Folder::kFirst;
    folder.WriteIndex();
    folder.ExpectRefused(kInvalid, {"ghost.weight", Folder::kFirst, "lacks"});
  }
  {
    Folder folder("mixtral");  // A shard holds a tensor that the index does not list.
    folder.WriteShards();
    folder.index["weight_map"].erase(norm);
    folder.WriteIndex();
    folder.ExpectRefused(kInvalid, {norm, "does not list"});
  }
  {
    Folder folder("mixtral");  // A tensor lies in another shard than the index says.
    folder.WriteShards();
    auto& entry = folder.index["weight_map"][norm];
    const std::string other = entry == Folder::kFirst ? Folder::kSecond : Folder::kFirst;
    entry = other;
    folder.WriteIndex();
    folder.ExpectRefused(kInvalid, {norm, "puts in " + other});
  }
  {
    Folder folder("mixtral");  // A tensor lies in two shards.
    folder.WriteShards();
    WriteFile(folder.dir.File("more.safetensors"), SafetensorsBytes({folder.Tensor(norm)}));
    folder.index["weight_map"]["extra"] = "more.safetensors";
    folder.WriteIndex();
    folder.ExpectRefused(kInvalid, {norm, "both in", "more.safetensors"});
  }
}

TEST(Checkpoint, IndexMustNotLeaveTheFolder) {
  for (const char* path :
       {"../model.safetensors", "/etc/passwd", "a/../../x", "", ".", "a//../b", "./x", "sub/"}) {
    Folder folder("mixtral");
    folder.WriteShards();
    folder.index["weight_map"]["model.norm.weight"] = path;
    folder.WriteIndex();
    folder.ExpectRefused(kInvalid, {"model.norm.weight", "inside the model folder"});
  }
}

TEST(Checkpoint, IndexMustBeAnIndex) {
  for (const char* text :
       {"", "{", "[]", "{}", R"({"weight_map": {}})", R"({"weight_map": []})",
        R"({"weight_map": {"a": 7}})", R"({"weight_map": {"a": "x", "a": "y"}})"}) {
    Folder folder("mixtral");
    folder.WriteShards();
    WriteFile(folder.dir.File("model.safetensors.index.json"), text);
    folder.ExpectRefused(kInvalid, {"model.safetensors.index.json"});
  }
}

// Flipped bits anywhere in the header or the index give a status or weights, never a crash.
TEST(Checkpoint, RandomDamageNeverCrashes) {
  std::mt19937_64 rng(testing_support::TestSeed());
  Folder folder("deepseek_v2_plain");
  folder.WriteShards();
  const std::string index_path = folder.dir.File("model.safetensors.index.json");
  const std::string shard_path = folder.dir.File(Folder::kFirst);
  const std::string index = ReadFile(index_path);
  const std::string shard = ReadFile(shard_path);
  uint64_t header_bytes;
  std::memcpy(&header_bytes, shard.data(), 8);
  int refused = 0;
  for (int round = 0; round < 400; ++round) {
    std::string damaged_index = index;
    std::string damaged_shard = shard;
    if (round % 2 == 0) {
      damaged_index[rng() % index.size()] ^= static_cast<char>(1 << (rng() % 8));
    } else {
      damaged_shard[rng() % (8 + header_bytes)] ^= static_cast<char>(1 << (rng() % 8));
    }
    WriteFile(index_path, damaged_index);
    WriteFile(shard_path, damaged_shard);
    const absl::StatusOr<ModelWeights> weights = folder.Load();
    if (!weights.ok()) {
      ++refused;
      EXPECT_FALSE(weights.status().message().empty());
    } else {
      EXPECT_EQ(weights->tensors.size(), folder.tensors.size());
    }
  }
  EXPECT_GT(refused, 350);  // Few bits of either are without meaning.
}

}  // namespace
}  // namespace writescope::model
