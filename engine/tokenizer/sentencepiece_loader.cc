// Reads SentencePiece's tokenizer.model: BPE over characters, with or without byte fallback.
#include <algorithm>
#include <cmath>
#include <functional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_replace.h"
#include "engine/base/regular_file.h"
#include "engine/base/status_macros.h"
#include "engine/tokenizer/json_fields.h"
#include "engine/tokenizer/sentencepiece_normalizer.h"
#include "engine/tokenizer/sentencepiece_wire.h"
#include "engine/tokenizer/strings.h"
#include "engine/tokenizer/token_decoder.h"
#include "engine/tokenizer/tokenizer_parts.h"
#include "engine/tokenizer/utf8.h"

namespace writescope::tokenizer {
namespace {

using Type = SentencePieceModel::Type;

constexpr char kSpaceSpelling[] = "\u2581";
constexpr size_t kMaxPieces = 4 << 20;
constexpr size_t kMaxPieceBytes = 1024;  // Each piece is cut at every character below.

class SentencePieceLoader {
 public:
  SentencePieceLoader(SentencePieceModel file, const TokenizerConfig& config)
      : file_(std::move(file)), config_(config) {}

  absl::StatusOr<TokenizerParts> Load() {
    RETURN_IF_ERROR(CheckKind());
    ASSIGN_OR_RETURN(parts_.normalizer, MakeSentencePieceNormalizer(file_, config_.legacy));
    for (size_t i = 0; i < file_.pieces.size(); ++i) RETURN_IF_ERROR(AddPiece(i));
    RETURN_IF_ERROR(AddConfiguredTokens());
    RETURN_IF_ERROR(SetUnknown());
    AddVirtualChars();
    RETURN_IF_ERROR(AddMerges());
    parts_.bos_id = TokenAt(file_.bos_id);
    parts_.eos_id = TokenAt(file_.eos_id);
    parts_.add_bos_by_default = parts_.bos_id.has_value();
    parts_.strip_count = file_.add_dummy_prefix ? 1 : 0;
    return std::move(parts_);
  }

 private:
  absl::Status CheckKind() const {
    if (file_.model_type != SentencePieceModel::kBpe) {
      return absl::UnimplementedError(
          Cat("model_type ", file_.model_type, " is not supported; BPE (2) is"));
    }
    if (file_.treat_whitespace_as_suffix) {
      return absl::UnimplementedError("treat_whitespace_as_suffix is not supported");
    }
    if (file_.pieces.size() > kMaxPieces) {
      return absl::InvalidArgumentError(
          Cat(file_.pieces.size(), " pieces are above the limit of ", kMaxPieces));
    }
    return absl::OkStatus();
  }

  std::optional<TokenId> TokenAt(int64_t id) const {
    if (id < 0 || id >= static_cast<int64_t>(file_.pieces.size())) return std::nullopt;
    return static_cast<TokenId>(id);
  }

  absl::Status AddPiece(size_t index) {
    const SentencePieceModel::Piece& piece = file_.pieces[index];
    const auto id = static_cast<TokenId>(index);
    const auto refuse = [&](std::string_view what) {
      return absl::InvalidArgumentError(Cat("piece ", index, ": ", what));
    };
    if (piece.text.empty() || piece.text.size() > kMaxPieceBytes) {
      return refuse(Cat(piece.text.size(), " bytes long; 1 to ", kMaxPieceBytes, " may be"));
    }
    if (FindInvalidUtf8(piece.text) != std::string_view::npos) return refuse("invalid UTF-8");
    if (!std::isfinite(piece.score)) return refuse("a score that is no finite number");
    if (!parts_.ids.emplace(piece.text, id).second) {
      return refuse(Cat("\"", piece.text, "\" is there twice"));
    }
    std::string bytes = absl::StrReplaceAll(piece.text, {{kSpaceSpelling, " "}});
    bool special = false;
    switch (piece.type) {
      case Type::kNormal:
        AddSymbol(piece.text, id);
        break;
      case Type::kUserDefined: {
        if (Contains(piece.text, kSpaceSpelling)) {
          return absl::UnimplementedError(
              Cat("piece ", index, ": a user-defined piece with a space"));
        }
        AddedToken token{.id = id, .content = piece.text, .normalized = true};
        if (!token.IsControl()) AddSymbol(piece.text, id);
        parts_.added_tokens.push_back(std::move(token));
        break;
      }
      case Type::kControl:
      case Type::kUnknown:
        special = true;
        bytes = piece.text;
        parts_.added_tokens.push_back({.id = id, .content = piece.text, .special = true});
        break;
      case Type::kByte: {
        const int byte = ByteOfFallbackToken(piece.text);
        if (byte < 0) return refuse(Cat("\"", piece.text, "\" is no byte"));
        bytes = std::string(1, static_cast<char>(byte));
        if (file_.byte_fallback) parts_.model.byte_tokens[static_cast<size_t>(byte)] = id;
        break;
      }
      case Type::kUnused:
        return absl::UnimplementedError(
            Cat("piece ", index, ": pieces of type UNUSED are not supported"));
    }
    parts_.token_bytes.push_back(std::move(bytes));
    parts_.is_special.push_back(special);
    return absl::OkStatus();
  }

  void AddSymbol(const std::string& text, TokenId id) {
    symbols_.emplace(text, id);
    size_t next = 0;
    const char32_t c = DecodeAt(text, 0, &next);
    if (next == text.size()) parts_.model.char_symbols.emplace(c, id);
  }

  // tokenizer_config.json may add tokens behind the model's own.
  absl::Status AddConfiguredTokens() {
    for (const AddedToken& token : config_.added_tokens) {
      const auto known = parts_.ids.find(token.content);
      if (known != parts_.ids.end() && known->second == token.id) continue;
      if (known != parts_.ids.end() || static_cast<size_t>(token.id) < file_.pieces.size() ||
          static_cast<size_t>(token.id) > kMaxPieces) {
        return absl::InvalidArgumentError(Cat("tokenizer_config.json: added token \"",
                                              token.content, "\" cannot have id ", token.id));
      }
      const auto index = static_cast<size_t>(token.id);
      if (index >= parts_.token_bytes.size()) {
        parts_.token_bytes.resize(index + 1);
        parts_.is_special.resize(index + 1, false);
      }
      parts_.token_bytes[index] = token.content;
      parts_.is_special[index] = token.special;
      parts_.ids.emplace(token.content, token.id);
      parts_.added_tokens.push_back(token);
    }
    return absl::OkStatus();
  }

  absl::Status SetUnknown() {
    BpeModel& model = parts_.model;
    model.unknown = TokenAt(file_.unk_id);
    model.fuse_unknown = true;
    const auto& bytes = model.byte_tokens;
    const bool some_missing = std::find(bytes.begin(), bytes.end(), -1) != bytes.end();
    if (file_.byte_fallback ? some_missing : !model.unknown.has_value()) {
      return absl::InvalidArgumentError(
          file_.byte_fallback
              ? std::string("byte_fallback is set, but not every byte has a piece")
              : Cat("unk_id ", file_.unk_id, " is none of the ", file_.pieces.size(), " pieces"));
    }
    return absl::OkStatus();
  }

  // A character may be part of pieces without being one.
  void AddVirtualChars() {
    BpeModel& model = parts_.model;
    model.first_virtual = static_cast<int32_t>(parts_.token_bytes.size());
    for (const SentencePieceModel::Piece& piece : file_.pieces) {
      if (piece.type != Type::kNormal) continue;
      for (size_t pos = 0; pos < piece.text.size();) {
        const size_t begin = pos;
        const char32_t c = DecodeAt(piece.text, pos, &pos);
        const int32_t symbol =
            model.first_virtual + static_cast<int32_t>(model.virtual_chars.size());
        if (!model.char_symbols.try_emplace(c, symbol).second) continue;
        model.virtual_chars.push_back(piece.text.substr(begin, pos - begin));
        symbols_.emplace(model.virtual_chars.back(), symbol);
      }
    }
  }

  // SentencePiece merges any two neighbours that together are a piece, the best score first. So
  // every way to cut a piece in two known symbols is a rule, and its rank is that of the score.
  absl::Status AddMerges() {
    std::vector<float> scores;
    for (const auto& [text, symbol] : symbols_) {
      if (symbol < parts_.model.first_virtual) scores.push_back(ScoreOf(symbol));
    }
    std::sort(scores.begin(), scores.end(), std::greater<float>());
    scores.erase(std::unique(scores.begin(), scores.end()), scores.end());
    for (const auto& [text, symbol] : symbols_) {
      if (symbol >= parts_.model.first_virtual) continue;
      const auto rank =
          std::lower_bound(scores.begin(), scores.end(), ScoreOf(symbol), std::greater<float>()) -
          scores.begin();
      const std::string_view whole = text;
      for (size_t cut = CharLength(whole[0]); cut < whole.size(); cut += CharLength(whole[cut])) {
        const auto left = symbols_.find(ToAbsl(whole.substr(0, cut)));
        const auto right = symbols_.find(ToAbsl(whole.substr(cut)));
        if (left == symbols_.end() || right == symbols_.end()) continue;
        parts_.model.merges.Add(left->second, right->second, static_cast<int32_t>(rank), symbol);
      }
    }
    return absl::OkStatus();
  }
  float ScoreOf(int32_t symbol) const { return file_.pieces[static_cast<size_t>(symbol)].score; }

  const SentencePieceModel file_;
  const TokenizerConfig& config_;
  TokenizerParts parts_;
  absl::flat_hash_map<std::string, int32_t> symbols_;  // What merges work on, by spelling.
};

}  // namespace

absl::StatusOr<TokenizerParts> LoadSentencePiece(const std::string& path,
                                                 const TokenizerConfig& config) {
  ASSIGN_OR_RETURN(const std::string bytes, ReadRegularFile(path, kMaxTokenizerFileBytes));
  absl::StatusOr<SentencePieceModel> file = ParseSentencePieceModel(bytes);
  absl::StatusOr<TokenizerParts> parts =
      file.ok() ? SentencePieceLoader(*std::move(file), config).Load() : file.status();
  if (parts.ok()) return parts;
  return absl::Status(parts.status().code(), Cat(path, ": ", parts.status().message()));
}

}  // namespace writescope::tokenizer
