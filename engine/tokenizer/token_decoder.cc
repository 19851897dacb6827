#include "engine/tokenizer/token_decoder.h"

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_replace.h"
#include "engine/base/status_macros.h"
#include "engine/tokenizer/byte_level.h"
#include "engine/tokenizer/json_fields.h"
#include "engine/tokenizer/strings.h"
#include "engine/tokenizer/text_pattern.h"

namespace writescope::tokenizer {
namespace {

constexpr int kMaxDepth = 16;  // Sequences within sequences.

class DecoderReader {
 public:
  absl::Status AddSteps(const Json& spec, std::string_view where, int depth) {
    if (depth > kMaxDepth) {
      return absl::InvalidArgumentError(Cat(where, ": nested deeper than ", kMaxDepth));
    }
    ASSIGN_OR_RETURN(const std::string type, RequireString(spec, "type", where));
    if (type == "Sequence") {
      ASSIGN_OR_RETURN(const Json* specs, RequireArray(spec, "decoders", where));
      for (size_t i = 0; i < specs->size(); ++i) {
        RETURN_IF_ERROR(AddSteps((*specs)[i], Cat(where, ".decoders[", i, "]"), depth + 1));
      }
      return absl::OkStatus();
    }
    if (type == "ByteLevel") {
      decoder.byte_level = true;
    } else if (type == "ByteFallback") {
      decoder.byte_fallback = true;
    } else if (type == "Fuse") {
      fused_ = true;
    } else if (type == "Replace") {
      return AddReplace(spec, where);
    } else if (type == "Metaspace") {
      return AddMetaspace(spec, where);
    } else if (type == "Strip") {
      return AddStrip(spec, where);
    } else {
      return absl::UnimplementedError(Cat(where, ": the kind \"", type, "\" is not supported"));
    }
    return absl::OkStatus();
  }

  TokenDecoder decoder;

 private:
  absl::Status AddReplace(const Json& spec, std::string_view where) {
    ASSIGN_OR_RETURN(const TextPattern pattern, TextPattern::FromJson(spec, where));
    ASSIGN_OR_RETURN(std::string content, RequireString(spec, "content", where));
    if (!pattern.literal().has_value() || fused_) {
      return absl::UnimplementedError(
          Cat(where, ": Replace is supported in single tokens only and for a String pattern"));
    }
    decoder.replacements.emplace_back(*pattern.literal(), std::move(content));
    return absl::OkStatus();
  }

  absl::Status AddMetaspace(const Json& spec, std::string_view where) {
    ASSIGN_OR_RETURN(const std::string space, RequireString(spec, "replacement", where));
    ASSIGN_OR_RETURN(const bool add_prefix, BoolOr(spec, "add_prefix_space", true, where));
    ASSIGN_OR_RETURN(const std::string scheme,
                     StringOr(spec, "prepend_scheme", add_prefix ? "always" : "never", where));
    decoder.replacements.emplace_back(space, " ");
    decoder.strip.assign(1, ' ');
    decoder.strip_count = scheme == "never" ? 0 : 1;
    return absl::OkStatus();
  }

  absl::Status AddStrip(const Json& spec, std::string_view where) {
    ASSIGN_OR_RETURN(decoder.strip, RequireString(spec, "content", where));
    ASSIGN_OR_RETURN(decoder.strip_count, RequireInt32(spec, "start", where));
    ASSIGN_OR_RETURN(const int32_t stop, RequireInt32(spec, "stop", where));
    if (stop != 0 || !fused_ || decoder.strip.size() != 1) {
      return absl::UnimplementedError(Cat(
          where, ": Strip is supported behind Fuse, at the start, and for one ASCII character"));
    }
    return absl::OkStatus();
  }

  bool fused_ = false;  // Steps behind Fuse see the whole text.
};

}  // namespace

int ByteOfFallbackToken(std::string_view token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token.back() != '>') return -1;
  const std::string_view hex = token.substr(3, 2);
  if (!absl::ascii_isxdigit(static_cast<unsigned char>(hex[0])) ||
      !absl::ascii_isxdigit(static_cast<unsigned char>(hex[1]))) {
    return -1;
  }
  return static_cast<unsigned char>(absl::HexStringToBytes(ToAbsl(hex)).front());
}

absl::StatusOr<TokenDecoder> TokenDecoder::FromJson(const nlohmann::json& spec) {
  if (spec.is_null()) {
    return absl::UnimplementedError("decoder: a tokenizer without a decoder is not supported");
  }
  DecoderReader reader;
  RETURN_IF_ERROR(reader.AddSteps(spec, "decoder", 0));
  if (reader.decoder.byte_level &&
      (reader.decoder.byte_fallback || !reader.decoder.replacements.empty())) {
    return absl::UnimplementedError(
        "decoder: ByteLevel together with ByteFallback or Replace is not supported");
  }
  return std::move(reader.decoder);
}

std::string TokenDecoder::BytesOf(std::string_view token) const {
  if (byte_level) return BytesOfSpelling(token);
  if (byte_fallback) {
    if (const int byte = ByteOfFallbackToken(token); byte >= 0) {
      return std::string(1, static_cast<char>(byte));
    }
  }
  std::string bytes(token);
  for (const auto& [from, to] : replacements) absl::StrReplaceAll({{from, to}}, &bytes);
  return bytes;
}

}  // namespace writescope::tokenizer
