// Reads tokenizer.json: byte-level BPE, and BPE over characters with byte fallback.
#include <limits>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/strings/str_split.h"
#include "engine/base/status_macros.h"
#include "engine/tokenizer/byte_level.h"
#include "engine/tokenizer/json_fields.h"
#include "engine/tokenizer/strings.h"
#include "engine/tokenizer/token_decoder.h"
#include "engine/tokenizer/tokenizer_parts.h"
#include "engine/tokenizer/utf8.h"

namespace writescope::tokenizer {
namespace {

// Ids index tables, so one wild id must not make them huge. The largest vocabularies in use hold
// about 260,000 tokens.
constexpr TokenId kMaxTokenId = 4 << 20;

class JsonLoader {
 public:
  explicit JsonLoader(const Json& file) : file_(file) {}

  absl::StatusOr<TokenizerParts> Load() {
    static const Json kNull;
    const auto field = [this](const char* key) {
      const Json* found = FindField(file_, key);
      return found == nullptr ? &kNull : found;
    };
    ASSIGN_OR_RETURN(model_, RequireObject(file_, "model", "top level"));
    ASSIGN_OR_RETURN(const std::string type, StringOr(*model_, "type", "BPE", "model"));
    if (type != "BPE") {
      return absl::UnimplementedError(
          Cat("model: the kind \"", type, "\" is not supported; BPE is"));
    }
    ASSIGN_OR_RETURN(parts_.normalizer, MakeNormalizer(*field("normalizer")));
    ASSIGN_OR_RETURN(parts_.pre_tokenizer, PreTokenizer::FromJson(*field("pre_tokenizer")));
    ASSIGN_OR_RETURN(decoder_, TokenDecoder::FromJson(*field("decoder")));
    if (decoder_.byte_level != parts_.pre_tokenizer.byte_level()) {
      return absl::InvalidArgumentError("ByteLevel is in only one of pre_tokenizer and decoder");
    }
    RETURN_IF_ERROR(ReadVocabulary());
    RETURN_IF_ERROR(ReadAddedTokens());
    RETURN_IF_ERROR(ReadModelOptions());
    RETURN_IF_ERROR(ReadMerges());
    RETURN_IF_ERROR(ReadPostProcessor(*field("post_processor"), "post_processor"));
    parts_.strip = decoder_.strip.empty() ? ' ' : decoder_.strip.front();
    parts_.strip_count = decoder_.strip_count;
    return std::move(parts_);
  }

 private:
  absl::Status SetBytes(TokenId id, std::string bytes) {
    if (id > kMaxTokenId) {
      return absl::InvalidArgumentError(
          Cat("token id ", id, " is above the limit of ", kMaxTokenId));
    }
    const auto index = static_cast<size_t>(id);
    if (index >= parts_.token_bytes.size()) {
      parts_.token_bytes.resize(index + 1);
      parts_.is_special.resize(index + 1, false);
    }
    parts_.token_bytes[index] = std::move(bytes);
    return absl::OkStatus();
  }

  absl::Status ReadVocabulary() {
    ASSIGN_OR_RETURN(const Json* vocabulary, RequireObject(*model_, "vocab", "model"));
    if (vocabulary->empty()) return absl::InvalidArgumentError("model.vocab is empty");
    parts_.ids.reserve(vocabulary->size());
    for (const auto& [token, value] : vocabulary->items()) {
      if (!value.is_number_unsigned() || value > kMaxTokenId) {
        return absl::InvalidArgumentError(
            Cat("model.vocab[\"", token, "\"] is ", value.dump(), ", not a token id"));
      }
      const auto id = value.get<TokenId>();
      parts_.ids.emplace(token, id);
      RETURN_IF_ERROR(SetBytes(id, decoder_.BytesOf(token)));
    }
    return absl::OkStatus();
  }

  absl::Status ReadAddedTokens() {
    if (FindField(file_, "added_tokens") == nullptr) return absl::OkStatus();
    ASSIGN_OR_RETURN(const Json* specs, RequireArray(file_, "added_tokens", "top level"));
    for (size_t i = 0; i < specs->size(); ++i) {
      const std::string where = Cat("added_tokens[", i, "]");
      ASSIGN_OR_RETURN(AddedToken token, ReadAddedToken((*specs)[i], where));
      ASSIGN_OR_RETURN(token.id, RequireInt32((*specs)[i], "id", where));
      const auto [known, is_new] = parts_.ids.try_emplace(token.content, token.id);
      if (!is_new && known->second != token.id) {
        return absl::InvalidArgumentError(Cat(where, ": \"", token.content, "\" has id ", token.id,
                                              " here and ", known->second, " in model.vocab"));
      }
      // Some files list the byte tokens here as well; they still stand for bytes.
      const bool is_byte = decoder_.byte_fallback && ByteOfFallbackToken(token.content) >= 0;
      RETURN_IF_ERROR(
          SetBytes(token.id, is_byte ? decoder_.BytesOf(token.content) : token.content));
      parts_.is_special[static_cast<size_t>(token.id)] = token.special;
      if (token.IsControl()) control_ids_.insert(token.id);
      parts_.added_tokens.push_back(std::move(token));
    }
    return absl::OkStatus();
  }

  absl::Status ReadModelOptions() {
    for (const char* affix : {"continuing_subword_prefix", "end_of_word_suffix"}) {
      ASSIGN_OR_RETURN(const std::string text, StringOr(*model_, affix, "", "model"));
      if (!text.empty()) {
        return absl::UnimplementedError(Cat("model: ", affix, " \"", text, "\" is not supported"));
      }
    }
    BpeModel& model = parts_.model;
    ASSIGN_OR_RETURN(model.fuse_unknown, BoolOr(*model_, "fuse_unk", false, "model"));
    ASSIGN_OR_RETURN(const std::string unknown, StringOr(*model_, "unk_token", "", "model"));
    if (!unknown.empty()) {
      const auto id = parts_.ids.find(unknown);
      if (id == parts_.ids.end()) {
        return absl::InvalidArgumentError(
            Cat("model.unk_token \"", unknown, "\" is not in the vocabulary"));
      }
      model.unknown = id->second;
    }
    ASSIGN_OR_RETURN(const bool ignore_merges, BoolOr(*model_, "ignore_merges", false, "model"));
    ASSIGN_OR_RETURN(const bool byte_fallback, BoolOr(*model_, "byte_fallback", false, "model"));
    model.byte_level = decoder_.byte_level;
    if (ignore_merges) SetWholeWords();
    return model.byte_level ? SetByteSymbols() : SetCharSymbols(byte_fallback);
  }

  void SetWholeWords() {
    for (const auto& [token, id] : parts_.ids) {
      if (control_ids_.contains(id)) continue;  // Text must not turn into a control token.
      const bool byte_level = parts_.model.byte_level;
      parts_.model.whole_words.emplace(byte_level ? BytesOfSpelling(token) : token, id);
    }
  }

  absl::Status SetByteSymbols() {
    for (size_t byte = 0; byte < 256; ++byte) {
      const auto id = parts_.ids.find(ByteSpellings()[byte]);
      if (id != parts_.ids.end()) {
        parts_.model.byte_tokens[byte] = id->second;
        continue;
      }
      const bool in_utf8 = byte != 0xC0 && byte != 0xC1 && byte < 0xF5;
      if (in_utf8) {
        return absl::InvalidArgumentError(
            Cat("model.vocab has no token for the byte ", byte, ", which text may hold"));
      }
    }
    return absl::OkStatus();
  }

  absl::Status SetCharSymbols(bool byte_fallback) {
    BpeModel& model = parts_.model;
    for (const auto& [token, id] : parts_.ids) {
      const int byte = ByteOfFallbackToken(token);
      if (byte_fallback && byte >= 0) model.byte_tokens[static_cast<size_t>(byte)] = id;
      if (token.empty() || control_ids_.contains(id)) continue;
      size_t next = 0;
      const char32_t c = DecodeAt(token, 0, &next);
      if (next == token.size()) model.char_symbols.emplace(c, id);
    }
    for (size_t byte = 0; byte < 256 && !model.unknown.has_value(); ++byte) {
      if (model.byte_tokens[byte] >= 0) continue;
      return absl::InvalidArgumentError(
          Cat("model: no unk_token, and no token <0xHH> for the byte ", byte,
              ": some text could not be spelled"));
    }
    return absl::OkStatus();
  }

  absl::Status ReadMerges() {
    ASSIGN_OR_RETURN(const Json* merges, RequireArray(*model_, "merges", "model"));
    for (size_t i = 0; i < merges->size(); ++i) {
      ASSIGN_OR_RETURN(const auto pair, ReadMerge((*merges)[i], i));
      const auto& [left, right] = pair;
      const auto left_id = parts_.ids.find(left);
      const auto right_id = parts_.ids.find(right);
      const auto merged_id = parts_.ids.find(left + right);
      const auto none = parts_.ids.end();
      if (left_id == none || right_id == none || merged_id == none) {
        return absl::InvalidArgumentError(Cat("model.merges[", i, "]: \"", left, "\" and \"", right,
                                              "\": a part or the whole is not in model.vocab"));
      }
      // Text must not turn into a control token, however its pieces are put together.
      if (control_ids_.contains(merged_id->second)) continue;
      parts_.model.merges.Add(left_id->second, right_id->second, static_cast<int32_t>(i),
                              merged_id->second);
    }
    return absl::OkStatus();
  }

  static absl::StatusOr<std::pair<std::string, std::string>> ReadMerge(const Json& merge,
                                                                       size_t index) {
    if (merge.is_string()) {
      const std::vector<std::string> parts =
          absl::StrSplit(merge.get_ref<const std::string&>(), ' ');
      if (parts.size() == 2) return std::make_pair(parts[0], parts[1]);
    } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() &&
               merge[1].is_string()) {
      return std::make_pair(merge[0].get<std::string>(), merge[1].get<std::string>());
    }
    return absl::InvalidArgumentError(
        Cat("model.merges[", index, "] is ", merge.dump(), ", not a pair of tokens"));
  }

  // Only what is put in front of a text matters here: what a template puts behind it ends a
  // training example, and would end the prompt.
  absl::Status ReadPostProcessor(const Json& spec, const std::string& where) {
    if (spec.is_null()) return absl::OkStatus();
    ASSIGN_OR_RETURN(const std::string type, RequireString(spec, "type", where));
    if (type == "ByteLevel") return absl::OkStatus();
    if (type == "Sequence") {
      ASSIGN_OR_RETURN(const Json* specs, RequireArray(spec, "processors", where));
      for (size_t i = 0; i < specs->size(); ++i) {
        const std::string inner = Cat(where, ".processors[", i, "]");
        const Json* inner_type = FindField((*specs)[i], "type");
        if (inner_type != nullptr && *inner_type == "Sequence") {
          return absl::UnimplementedError(Cat(inner, ": a nested Sequence"));
        }
        RETURN_IF_ERROR(ReadPostProcessor((*specs)[i], inner));
      }
      return absl::OkStatus();
    }
    if (type != "TemplateProcessing") {
      return absl::UnimplementedError(Cat(where, ": the kind \"", type, "\" is not supported"));
    }
    ASSIGN_OR_RETURN(const Json* single, RequireArray(spec, "single", where));
    for (const Json& item : *single) {
      if (FindField(item, "Sequence") != nullptr) break;
      ASSIGN_OR_RETURN(const Json* token, RequireObject(item, "SpecialToken", where));
      ASSIGN_OR_RETURN(const std::string name, RequireString(*token, "id", where));
      RETURN_IF_ERROR(AppendPrefix(spec, name, where));
    }
    parts_.add_bos_by_default = !parts_.prefix.empty();
    return absl::OkStatus();
  }

  absl::Status AppendPrefix(const Json& spec, const std::string& name, const std::string& where) {
    ASSIGN_OR_RETURN(const Json* specials, RequireObject(spec, "special_tokens", where));
    ASSIGN_OR_RETURN(const Json* special, RequireObject(*specials, name.c_str(), where));
    ASSIGN_OR_RETURN(const Json* ids, RequireArray(*special, "ids", where));
    for (const Json& id : *ids) {
      if (!id.is_number_unsigned() || id >= parts_.token_bytes.size()) {
        return absl::InvalidArgumentError(
            Cat(where, ": special token \"", name, "\": no token has id ", id.dump()));
      }
      parts_.prefix.push_back(id.get<TokenId>());
    }
    return absl::OkStatus();
  }

  const Json& file_;
  const Json* model_ = nullptr;
  TokenDecoder decoder_;
  TokenizerParts parts_;
  absl::flat_hash_set<TokenId> control_ids_;
};

}  // namespace

absl::StatusOr<TokenizerParts> LoadTokenizerJson(const std::string& path) {
  ASSIGN_OR_RETURN(const Json file, ReadJsonFile(path));
  absl::StatusOr<TokenizerParts> parts = JsonLoader(file).Load();
  if (parts.ok()) return parts;
  return absl::Status(parts.status().code(), Cat(path, ": ", parts.status().message()));
}

}  // namespace writescope::tokenizer
