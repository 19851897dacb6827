#include "engine/tokenizer/tokenizer.h"

#include <deque>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "engine/base/status_macros.h"
#include "engine/tokenizer/added_tokens.h"
#include "engine/tokenizer/detokenizer.h"
#include "engine/tokenizer/strings.h"
#include "engine/tokenizer/tokenizer_parts.h"
#include "engine/tokenizer/utf8.h"

namespace writescope::tokenizer {
namespace {

// Far above any context length. A text without a word border takes some 50 times its size in memory
// while it is merged, and ICU counts its bytes in int32.
constexpr size_t kMaxTextBytes = size_t{64} << 20;

// Words met before in the same call are looked up. Longer words are rare, and more words than this
// are not kept.
constexpr size_t kMaxCachedWordBytes = 64;
constexpr size_t kMaxCachedWords = size_t{1} << 16;

std::vector<AddedToken> Select(const std::vector<AddedToken>& tokens, bool normalized) {
  std::vector<AddedToken> selected;
  for (const AddedToken& token : tokens) {
    if (token.normalized == normalized) selected.push_back(token);
  }
  return selected;
}

// A folder's tokenizer file, whichever it has.
absl::StatusOr<TokenizerParts> LoadParts(const std::string& model_dir,
                                         const TokenizerConfig& config) {
  absl::StatusOr<TokenizerParts> parts = LoadTokenizerJson(Cat(model_dir, "/tokenizer.json"));
  if (!absl::IsNotFound(parts.status())) return parts;
  parts = LoadSentencePiece(Cat(model_dir, "/tokenizer.model"), config);
  if (!absl::IsNotFound(parts.status())) return parts;
  return absl::NotFoundError(
      Cat("no tokenizer in ", model_dir, ": neither tokenizer.json nor tokenizer.model"));
}

absl::Status ResolveToken(const std::string& text, const char* name, const TokenizerParts& parts,
                          std::optional<TokenId>* id) {
  if (text.empty()) return absl::OkStatus();
  const auto found = parts.ids.find(text);
  if (found == parts.ids.end()) {
    return absl::InvalidArgumentError(
        Cat("tokenizer_config.json: ", name, " \"", text, "\" is not in the vocabulary"));
  }
  *id = found->second;
  return absl::OkStatus();
}

}  // namespace

struct Tokenizer::Impl {
  explicit Impl(TokenizerParts loaded)
      : parts(std::move(loaded)),
        raw_tokens(Select(parts.added_tokens, /*normalized=*/false)),
        normalized_tokens(Select(parts.added_tokens, /*normalized=*/true)) {}

  bool HasToken(TokenId id) const {
    return id >= 0 && static_cast<size_t>(id) < parts.token_bytes.size();
  }

  const TokenizerParts parts;
  const AddedTokenMatcher raw_tokens;
  const AddedTokenMatcher normalized_tokens;
};

namespace {

// One call of Encode. The text of all segments is cut three times: at added tokens, at added
// tokens that are only looked for between those, and into words.
class EncodeCall {
 public:
  EncodeCall(const TokenizerParts& parts, const AddedTokenMatcher& raw_tokens,
             const AddedTokenMatcher& normalized_tokens)
      : parts_(parts), raw_tokens_(raw_tokens), normalized_tokens_(normalized_tokens) {}

  absl::Status Join(std::span<const Segment> segments) {
    for (size_t i = 0; i < segments.size(); ++i) {
      const Segment& segment = segments[i];
      if (const size_t bad = FindInvalidUtf8(segment.text); bad != std::string_view::npos) {
        return absl::InvalidArgumentError(
            Cat("invalid UTF-8 in segment ", i, " at byte ", bad, " of ", segment.text.size()));
      }
      if (segment.text.size() > kMaxTextBytes - text_.size()) {
        return absl::InvalidArgumentError(Cat("the text is longer than ", kMaxTextBytes, " bytes"));
      }
      const size_t begin = text_.size();
      text_ += segment.text;
      if (!segment.allow_special || segment.text.empty()) continue;
      if (!control_ranges_.empty() && control_ranges_.back().end == begin) {
        control_ranges_.back().end = text_.size();
      } else {
        control_ranges_.push_back({begin, text_.size()});
      }
    }
    return absl::OkStatus();
  }

  void Run(std::vector<TokenId>* ids) {
    std::vector<AddedTokenMatcher::Match> matches;
    raw_tokens_.Find(text_, {0, text_.size()}, control_ranges_, &matches);
    size_t pos = 0;
    for (const AddedTokenMatcher::Match& match : matches) {
      EncodePiece({pos, match.begin}, ids);
      ids->push_back(match.id);
      pos = match.end;
    }
    EncodePiece({pos, text_.size()}, ids);
  }

 private:
  // Tokens with the flag "normalized" are looked for in the text as it was given, not after it was
  // normalised: only there is it known which text may hold control tokens.
  void EncodePiece(ByteRange piece, std::vector<TokenId>* ids) {
    if (piece.begin == piece.end) return;
    std::vector<AddedTokenMatcher::Match> matches;
    normalized_tokens_.Find(text_, piece, control_ranges_, &matches);
    size_t pos = piece.begin;
    for (const AddedTokenMatcher::Match& match : matches) {
      EncodeStretch({pos, match.begin}, piece, ids);
      ids->push_back(match.id);
      pos = match.end;
    }
    EncodeStretch({pos, piece.end}, piece, ids);
  }

  void EncodeStretch(ByteRange stretch, ByteRange piece, std::vector<TokenId>* ids) {
    const StretchContext context = {.at_text_start = stretch.begin == 0,
                                    .at_piece_start = stretch.begin == piece.begin,
                                    .at_piece_end = stretch.end == piece.end};
    const std::string_view text =
        std::string_view(text_).substr(stretch.begin, stretch.end - stretch.begin);
    const std::string& normalized = storage_.emplace_back(parts_.normalizer->Apply(text, context));
    parts_.pre_tokenizer.Split(normalized, context.at_text_start, &split_scratch_, &storage_,
                               &words_);
    for (const std::string_view word : words_) EncodeWord(word, ids);
  }

  // Words stay alive in storage_, so the cache may keep views of them.
  void EncodeWord(std::string_view word, std::vector<TokenId>* ids) {
    if (word.size() > kMaxCachedWordBytes) {
      parts_.model.EncodeWord(word, &model_scratch_, ids);
      return;
    }
    const auto known = cache_.find(ToAbsl(word));
    if (known != cache_.end()) {
      // By index: the ids of the first meeting are in the vector that grows here.
      for (size_t i = 0; i < known->second.count; ++i) {
        const TokenId id = (*ids)[known->second.first + i];
        ids->push_back(id);
      }
      return;
    }
    const size_t first = ids->size();
    parts_.model.EncodeWord(word, &model_scratch_, ids);
    if (cache_.size() < kMaxCachedWords)
      cache_.emplace(ToAbsl(word), IdRange{first, ids->size() - first});
  }

  struct IdRange {
    size_t first;
    size_t count;
  };

  const TokenizerParts& parts_;
  const AddedTokenMatcher& raw_tokens_;
  const AddedTokenMatcher& normalized_tokens_;
  std::string text_;
  std::vector<ByteRange> control_ranges_;
  std::deque<std::string> storage_;
  PreTokenizer::Scratch split_scratch_;
  std::vector<std::string_view> words_;
  BpeModel::Scratch model_scratch_;
  absl::flat_hash_map<absl::string_view, IdRange> cache_;
};

}  // namespace

Tokenizer::Tokenizer(std::unique_ptr<const Impl> impl) : impl_(std::move(impl)) {}
Tokenizer::~Tokenizer() = default;

absl::StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::Load(const std::string& model_dir) {
  ASSIGN_OR_RETURN(const TokenizerConfig config, TokenizerConfig::Load(model_dir));
  ASSIGN_OR_RETURN(TokenizerParts parts, LoadParts(model_dir, config));
  RETURN_IF_ERROR(ResolveToken(config.bos_token, "bos_token", parts, &parts.bos_id));
  RETURN_IF_ERROR(ResolveToken(config.eos_token, "eos_token", parts, &parts.eos_id));
  if (!parts.bos_id.has_value() && parts.prefix.size() == 1) parts.bos_id = parts.prefix.front();
  if (parts.prefix.empty() && parts.bos_id.has_value()) parts.prefix = {*parts.bos_id};
  parts.add_bos_by_default = config.add_bos_token.value_or(parts.add_bos_by_default);
  if (parts.add_bos_by_default && parts.prefix.empty()) {
    return absl::InvalidArgumentError(
        Cat(model_dir, ": tokenizer_config.json sets add_bos_token, but no bos_token is named"));
  }
  return std::unique_ptr<Tokenizer>(new Tokenizer(std::make_unique<const Impl>(std::move(parts))));
}

absl::StatusOr<std::vector<TokenId>> Tokenizer::Encode(std::span<const Segment> segments,
                                                       bool add_bos) const {
  std::vector<TokenId> ids;
  if (add_bos) {
    if (impl_->parts.prefix.empty()) {
      return absl::InvalidArgumentError("BOS was asked for, but this tokenizer has none");
    }
    ids = impl_->parts.prefix;
  }
  EncodeCall call(impl_->parts, impl_->raw_tokens, impl_->normalized_tokens);
  RETURN_IF_ERROR(call.Join(segments));
  call.Run(&ids);
  return ids;
}

std::string Tokenizer::Decode(std::span<const TokenId> ids, bool skip_special) const {
  IncrementalDetokenizer detokenizer(*this, skip_special);
  std::string text;
  for (const TokenId id : ids) text += detokenizer.Push(id);
  return text + detokenizer.Finish();
}

int Tokenizer::vocab_size() const { return static_cast<int>(impl_->parts.token_bytes.size()); }

bool Tokenizer::IsSpecial(TokenId id) const {
  return impl_->HasToken(id) && impl_->parts.is_special[static_cast<size_t>(id)];
}

std::optional<TokenId> Tokenizer::TokenToId(std::string_view spelling) const {
  const auto found = impl_->parts.ids.find(ToAbsl(spelling));
  if (found == impl_->parts.ids.end()) return std::nullopt;
  return found->second;
}

std::string_view Tokenizer::TokenBytes(TokenId id) const {
  if (!impl_->HasToken(id)) return {};
  return impl_->parts.token_bytes[static_cast<size_t>(id)];
}

std::optional<TokenId> Tokenizer::bos_id() const { return impl_->parts.bos_id; }
std::optional<TokenId> Tokenizer::eos_id() const { return impl_->parts.eos_id; }
bool Tokenizer::add_bos_by_default() const { return impl_->parts.add_bos_by_default; }
char Tokenizer::leading_strip() const { return impl_->parts.strip; }
int Tokenizer::leading_strip_count() const { return impl_->parts.strip_count; }

}  // namespace writescope::tokenizer
