#include "tests/support/safetensors_writer.h"

#include <fstream>
#include <sstream>
#include <utility>

#include "engine/base/bf16.h"
#include "engine/base/check.h"
#include "nlohmann/json.hpp"

namespace writescope::testing_support {

TensorToWrite FloatTensor(const std::string& name, const std::string& dtype,
                          std::vector<int64_t> shape, std::span<const float> values) {
  TensorToWrite tensor{name, dtype, std::move(shape), {}};
  CHECK(dtype == "F32" || dtype == "BF16") << dtype;
  for (const float value : values) {
    if (dtype == "F32") {
      tensor.bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
    } else {
      const uint16_t bits = FloatToBf16(value);
      tensor.bytes.append(reinterpret_cast<const char*>(&bits), sizeof(bits));
    }
  }
  return tensor;
}

std::string SafetensorsHeader(const std::vector<TensorToWrite>& tensors) {
  nlohmann::ordered_json header;
  header["__metadata__"] = {{"format", "pt"}};
  size_t begin = 0;
  for (const TensorToWrite& tensor : tensors) {
    const size_t end = begin + tensor.bytes.size();
    header[tensor.name] = {
        {"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {begin, end}}};
    begin = end;
  }
  return header.dump();
}

std::string SafetensorsFromParts(const std::string& header, const std::string& data) {
  const uint64_t header_bytes = header.size();
  std::string file(reinterpret_cast<const char*>(&header_bytes), sizeof(header_bytes));
  return file + header + data;
}

std::string SafetensorsBytes(const std::vector<TensorToWrite>& tensors) {
  std::string data;
  for (const TensorToWrite& tensor : tensors) data += tensor.bytes;
  return SafetensorsFromParts(SafetensorsHeader(tensors), data);
}

void WriteFile(const std::string& path, const std::string& bytes) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  file.close();
  CHECK(!file.fail()) << "cannot write " << bytes.size() << " bytes to " << path;
}

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  CHECK(file.is_open()) << "cannot open " << path;
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

}  // namespace writescope::testing_support
