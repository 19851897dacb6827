// Prompts for the demo checkpoint: prose with harbor codes planted in it, and a question about one.
#pragma once

#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "engine/base/check.h"

namespace writescope::testing {

struct HarborCode {
  std::string city;
  std::string code;
};

inline std::vector<HarborCode> RandomHarborCodes(int count, unsigned seed) {
  const std::vector<std::string> cities = {
      "Lima",    "Havana",  "Lisbon",  "Canton", "Bombay", "Naples",  "Odessa",   "Hamburg",
      "Antwerp", "Brest",   "Porto",   "London", "Dublin", "Sydney",  "Auckland", "Manila",
      "Quebec",  "Halifax", "Newport", "Boston", "Salem",  "Zanzibar"};
  std::mt19937 rng(seed);
  std::vector<HarborCode> codes;
  for (int i = 0; i < count; ++i) {
    std::string code;
    for (int digit = 0; digit < 5; ++digit) code += static_cast<char>('0' + rng() % 10);
    codes.push_back({cities[static_cast<size_t>(i)], code});
  }
  return codes;
}

inline std::string ReadText(const std::string& path) {
  std::ifstream file(path);
  CHECK(file.good()) << path;
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// About `num_bytes` of prose with the codes planted evenly in its first nine tenths.
inline std::string PlantedProse(const std::string& prose, size_t num_bytes,
                                const std::vector<HarborCode>& codes) {
  std::string text;
  while (text.size() < num_bytes) text += prose;
  text.resize(num_bytes);
  // Plants go behind the end of a sentence, from the back so that earlier places stay.
  for (size_t i = codes.size(); i-- > 0;) {
    const size_t wanted = num_bytes * 9 / 10 * (i + 1) / (codes.size() + 1);
    size_t at = text.rfind(". ", wanted);
    at = at == std::string::npos ? 0 : at + 1;
    text.insert(at, " The harbor code of " + codes[i].city + " is " + codes[i].code + ".");
  }
  return text;
}

inline std::string Question(const std::string& city) {
  return "\nQuestion: What is the harbor code of " + city + "?\nAnswer: The harbor code of " +
         city + " is ";
}

}  // namespace writescope::testing
