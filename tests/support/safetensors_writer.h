// Writes safetensors files for tests: right ones, and the parts to make wrong ones of.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace writescope::testing_support {

struct TensorToWrite {
  std::string name;
  std::string dtype;  // As the format spells it: "BF16".
  std::vector<int64_t> shape;
  std::string bytes;  // Little-endian values, row-major.
};

// A tensor of dtype "F32" or "BF16" (rounded) from float values.
TensorToWrite FloatTensor(const std::string& name, const std::string& dtype,
                          std::vector<int64_t> shape, std::span<const float> values);

// The header's JSON for tensors that lie one behind the other, in the order given.
std::string SafetensorsHeader(const std::vector<TensorToWrite>& tensors);

// A whole file from its header text and its data. The header is not padded: data may start at an
// odd address, as the format allows.
std::string SafetensorsFromParts(const std::string& header, const std::string& data);

// A whole file.
std::string SafetensorsBytes(const std::vector<TensorToWrite>& tensors);

// Replaces the file; a failure ends the process.
void WriteFile(const std::string& path, const std::string& bytes);
std::string ReadFile(const std::string& path);

}  // namespace writescope::testing_support
