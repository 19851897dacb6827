// The safetensors reader against files that are right, wrong and random.
#include "engine/model/safetensors.h"

#include <cstring>
#include <filesystem>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/safetensors_writer.h"
#include "tests/support/seed.h"
#include "tests/support/temp_dir.h"

namespace writescope::model {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing_support::FloatTensor;
using testing_support::ReadFile;
using testing_support::SafetensorsBytes;
using testing_support::SafetensorsFromParts;
using testing_support::SafetensorsHeader;
using testing_support::TempDir;
using testing_support::TensorToWrite;
using testing_support::WriteFile;

const auto kInvalid = absl::StatusCode::kInvalidArgument;
const auto kDataLoss = absl::StatusCode::kDataLoss;

absl::StatusOr<std::vector<TensorView>> Parse(const std::string& file) {
  return ParseSafetensors(std::as_bytes(std::span(file)), "w.safetensors");
}

absl::StatusOr<std::vector<TensorView>> ParseHeader(const std::string& header,
                                                    size_t data_bytes = 0) {
  // Parse keeps views only, and the tests of errors do not read them.
  return Parse(SafetensorsFromParts(header, std::string(data_bytes, '\0')));
}

std::vector<TensorToWrite> TwoTensors() {
  return {FloatTensor("b", "F32", {2, 3}, std::vector<float>{1, 2, 3, 4, 5, 6}),
          FloatTensor("a", "BF16", {3}, std::vector<float>{-1, 0, 1})};
}

void ExpectRefused(const std::string& file, absl::StatusCode code,
                   const std::vector<const char*>& in_message) {
  const absl::Status status = Parse(file).status();
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("w.safetensors"));
  for (const char* part : in_message) {
    EXPECT_THAT(std::string(status.message()), HasSubstr(part));
  }
}

TEST(Safetensors, ReadsWhatWasWritten) {
  const std::string file = SafetensorsBytes(TwoTensors());
  const absl::StatusOr<std::vector<TensorView>> tensors = Parse(file);
  ASSERT_TRUE(tensors.ok()) << tensors.status();
  ASSERT_EQ(tensors->size(), 2u);
  const TensorView& b = (*tensors)[0];
  EXPECT_EQ(b.name, "b");
  EXPECT_EQ(b.dtype, Dtype::kF32);
  EXPECT_THAT(b.shape, ElementsAre(2, 3));
  EXPECT_EQ(b.num_elements(), 6);
  ASSERT_EQ(b.bytes.size(), 24u);
  float last;
  std::memcpy(&last, b.bytes.data() + 20, 4);
  EXPECT_EQ(last, 6);
  EXPECT_EQ((*tensors)[1].name, "a");
  EXPECT_EQ((*tensors)[1].dtype, Dtype::kBF16);
}

TEST(Safetensors, AcceptsWhatTheFormatAllows) {
  EXPECT_THAT(*ParseHeader("{}"), IsEmpty());
  EXPECT_THAT(*ParseHeader("{\"__metadata__\":{\"format\":\"pt\"}}     "), IsEmpty());
  // A scalar, an empty tensor, and a null where metadata would be.
  const auto odd =
      ParseHeader(R"({"s":{"dtype":"I64","shape":[],"data_offsets":[0,8]},)"
                  R"("e":{"dtype":"F32","shape":[0,4],"data_offsets":[8,8]},"__metadata__":null})",
                  8);
  ASSERT_TRUE(odd.ok()) << odd.status();
  EXPECT_EQ((*odd)[0].num_elements(), 1);
  EXPECT_EQ((*odd)[1].num_elements(), 0);
  for (const char* name : {"BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "U16", "I16", "F16",
                           "BF16", "U32", "I32", "F32", "U64", "I64", "F64"}) {
    const std::optional<Dtype> dtype = ParseDtype(name);
    ASSERT_TRUE(dtype.has_value()) << name;
    EXPECT_STREQ(DtypeName(*dtype), name);
  }
}

TEST(Safetensors, RefusesBadLengths) {
  const std::string file = SafetensorsBytes(TwoTensors());
  const std::string header = SafetensorsHeader(TwoTensors());
  ExpectRefused("", kDataLoss, {"has 0 bytes"});
  ExpectRefused(file.substr(0, 7), kDataLoss, {"has 7 bytes"});
  ExpectRefused(std::string(8, '\xff'), kInvalid, {"18446744073709551615"});
  ExpectRefused(std::string("\x01\xe1\xf5\x05\0\0\0\0", 8), kInvalid, {"100000001", "100000000"});
  ExpectRefused(file.substr(0, 8 + header.size() - 1), kDataLoss, {"truncated"});
  const std::string size = std::to_string(file.size());
  const std::string size_less_1 = std::to_string(file.size() - 1);
  ExpectRefused(file.substr(0, file.size() - 1), kDataLoss,
                {"truncated", size.c_str(), size_less_1.c_str()});
  ExpectRefused(file + "x", kInvalid, {"only", size.c_str()});
  ExpectRefused("version https://git-lfs.github.com/spec/v1\noid sha256:0\n", kInvalid,
                {"Git LFS pointer"});
}

TEST(Safetensors, EveryTruncationIsAnError) {
  const std::string file = SafetensorsBytes(TwoTensors());
  for (size_t length = 0; length < file.size(); ++length) {
    EXPECT_FALSE(Parse(file.substr(0, length)).ok()) << length;
  }
}

struct BadHeader {
  const char* header;
  size_t data_bytes;
  const char* in_message;
};

TEST(Safetensors, RefusesBadHeaders) {
  const BadHeader cases[] = {
      {"", 0, "not valid JSON"},
      {"{", 0, "not valid JSON"},
      {"[]", 0, "must be an object"},
      {"\xff", 0, "not valid JSON"},
      {R"({"w":7})", 0, "must be an object"},
      {R"({"":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1, "empty name"},
      {R"({"w":{"shape":[1],"data_offsets":[0,1]}})", 1, "dtype \"\""},
      {R"({"w":{"dtype":"F31","shape":[1],"data_offsets":[0,4]}})", 4, "dtype \"F31\""},
      {R"({"w":{"dtype":7,"shape":[1],"data_offsets":[0,4]}})", 4, "dtype is 7"},
      {R"({"w":{"dtype":"U8","data_offsets":[0,1]}})", 1, "shape"},
      {R"({"w":{"dtype":"U8","shape":1,"data_offsets":[0,1]}})", 1, "shape"},
      {R"({"w":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}})", 1, "holds -1"},
      {R"({"w":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}})", 1, "holds 1.0"},
      {R"({"w":{"dtype":"U8","shape":["1"],"data_offsets":[0,1]}})", 1, "holds \"1\""},
      {R"({"w":{"dtype":"U8","shape":[1]}})", 1, "data_offsets"},
      {R"({"w":{"dtype":"U8","shape":[1],"data_offsets":[0]}})", 1, "data_offsets"},
      {R"({"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1,2]}})", 1, "data_offsets"},
      {R"({"w":{"dtype":"U8","shape":[1],"data_offsets":[-1,0]}})", 1, "holds -1"},
      {R"({"w":{"dtype":"U8","shape":[1],"data_offsets":[1,0]}})", 1, "[1, 0)"},
      {R"({"w":{"dtype":"U8","shape":[1],"data_offsets":[0,99999999999999999999]}})", 1, "holds"},
      {R"({"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,23]}})", 23,
       "[2, 3] of F32 takes 24"},
      // Products that wrap round 64 bits to the right number.
      {R"({"w":{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0]}})", 0, "2^63"},
      {R"({"w":{"dtype":"F32","shape":[4611686018427387905],"data_offsets":[0,4]}})", 4, "2^63"},
      {R"({"w":{"dtype":"U8","shape":[18446744073709551615],"data_offsets":[0,1]}})", 1, "2^63"},
      {R"({"w":{"dtype":"U8","shape":[18446744073709551615,0],"data_offsets":[0,0]}})", 0, "2^63"},
      {R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
       R"("b":{"dtype":"U8","shape":[4],"data_offsets":[3,7]}})",
       7, "overlap"},
      {R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
       R"("b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})",
       4, "overlap"},
      {R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
       R"("b":{"dtype":"U8","shape":[4],"data_offsets":[5,9]}})",
       9, "gap"},
      {R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[1,5]}})", 5, "gap"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[18446744073709551614,)"
       R"(18446744073709551615]}})",
       1, "gap"},
      {R"({"a":{"dtype":"U8","shape":[9],"data_offsets":[0,9]}})", 8, "truncated"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
       R"("a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
       1, "\"a\" occurs twice"},
      {R"({"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}})", 1,
       "\"dtype\" occurs twice"},
  };
  for (const BadHeader& bad : cases) {
    SCOPED_TRACE(bad.header);
    const absl::Status status = ParseHeader(bad.header, bad.data_bytes).status();
    EXPECT_FALSE(status.ok());
    EXPECT_THAT(std::string(status.message()), HasSubstr("w.safetensors"));
    EXPECT_THAT(std::string(status.message()), HasSubstr(bad.in_message));
  }
}

// Whatever the bytes, the answer is a status or views that lie within the file.
TEST(Safetensors, RandomDamageNeverLeavesTheFile) {
  std::mt19937_64 rng(testing_support::TestSeed());
  const std::string golden = ReadFile(WRITESCOPE_TESTDATA_DIR "/goldens/mixtral/model.safetensors");
  uint64_t header_bytes;
  std::memcpy(&header_bytes, golden.data(), 8);
  const std::string small = SafetensorsBytes(TwoTensors());
  uint64_t small_header_bytes;
  std::memcpy(&small_header_bytes, small.data(), 8);
  int accepted = 0;
  for (int round = 0; round < 4000; ++round) {
    const bool use_small = round % 8 != 0;
    std::string file = use_small ? small : golden;
    const uint64_t damageable = 8 + (use_small ? small_header_bytes : header_bytes);
    const int flips = 1 + static_cast<int>(rng() % 4);
    for (int i = 0; i < flips; ++i) {
      file[rng() % damageable] ^= static_cast<char>(1 << (rng() % 8));
    }
    if (round % 3 == 0) file.resize(rng() % (file.size() + 1));
    const absl::StatusOr<std::vector<TensorView>> tensors = Parse(file);
    if (!tensors.ok()) continue;
    ++accepted;
    for (const TensorView& tensor : *tensors) {
      const std::span<const std::byte> all = std::as_bytes(std::span(file));
      ASSERT_GE(tensor.bytes.data(), all.data());
      ASSERT_LE(tensor.bytes.data() + tensor.bytes.size(), all.data() + all.size());
    }
  }
  EXPECT_GT(accepted, 0);  // Flips inside a name or the metadata do no harm.
}

TEST(Safetensors, RandomBytesAreRefused) {
  std::mt19937_64 rng(testing_support::TestSeed());
  for (int round = 0; round < 1000; ++round) {
    std::string file(rng() % 200, '\0');
    for (char& c : file) c = static_cast<char>(rng());
    EXPECT_FALSE(Parse(file).ok());
    if (file.size() < 16) continue;
    // With a length that is right, the noise is taken for a header.
    const uint64_t header_bytes = file.size() - 8;
    std::memcpy(file.data(), &header_bytes, 8);
    EXPECT_FALSE(Parse(file).ok());
  }
}

TEST(SafetensorsFile, MapsAndSurvivesMoves) {
  TempDir dir;
  WriteFile(dir.File("w.safetensors"), SafetensorsBytes(TwoTensors()));
  absl::StatusOr<SafetensorsFile> opened = SafetensorsFile::Open(dir.File("w.safetensors"));
  ASSERT_TRUE(opened.ok()) << opened.status();
  SafetensorsFile file = *std::move(opened);
  SafetensorsFile moved = std::move(file);
  const TensorView* b = moved.Find("b");
  ASSERT_NE(b, nullptr);
  float first;
  std::memcpy(&first, b->bytes.data(), 4);
  EXPECT_EQ(first, 1);
  EXPECT_EQ(moved.Find("c"), nullptr);
}

TEST(SafetensorsFile, ReadsGoldenOutputs) {
  const absl::StatusOr<SafetensorsFile> file =
      SafetensorsFile::Open(WRITESCOPE_TESTDATA_DIR "/goldens/qwen3_moe/golden.safetensors");
  ASSERT_TRUE(file.ok()) << file.status();
  const TensorView* prompt = file->Find("prompt.517");
  ASSERT_NE(prompt, nullptr);
  EXPECT_EQ(prompt->dtype, Dtype::kI32);
  EXPECT_THAT(prompt->shape, ElementsAre(517));
  ASSERT_NE(file->Find("logits.517"), nullptr);
  EXPECT_THAT(file->Find("logits.517")->shape, ElementsAre(64, 128));
}

TEST(SafetensorsFile, NamesWhatCannotBeOpened) {
  TempDir dir;
  EXPECT_EQ(SafetensorsFile::Open(dir.File("none")).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(SafetensorsFile::Open(dir.path()).status().code(),
            absl::StatusCode::kFailedPrecondition);
  WriteFile(dir.File("empty"), "");
  EXPECT_EQ(SafetensorsFile::Open(dir.File("empty")).status().code(), kDataLoss);
}

}  // namespace
}  // namespace writescope::model
