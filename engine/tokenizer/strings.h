// Strings between the standard library and Abseil: a packaged Abseil built for C++14 has a
// string_view of its own, which does not convert to and from the standard one.
#pragma once

#include <string>
#include <string_view>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace writescope::tokenizer {

inline absl::string_view ToAbsl(std::string_view text) { return {text.data(), text.size()}; }

// absl::StrCat that takes std::string_view too.
template <typename... Parts>
std::string Cat(const Parts&... parts) {
  const auto adapt = [](const auto& part) -> decltype(auto) {
    if constexpr (std::is_same_v<std::decay_t<decltype(part)>, std::string_view>) {
      return ToAbsl(part);
    } else {
      return (part);
    }
  };
  return absl::StrCat(adapt(parts)...);
}

inline bool Contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

}  // namespace writescope::tokenizer
