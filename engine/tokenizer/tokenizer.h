// Text to token ids and back, for the tokenizers that checkpoints bring along.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/base/units.h"

namespace writescope::tokenizer {

// A stretch of prompt text. Segments are joined before anything else happens, so where the borders
// lie does not change how ordinary text is cut.
struct Segment {
  std::string text;
  // Whether the text of control tokens in it becomes control tokens. Never set it for text that a
  // user wrote: there such text is encoded like any other, and decodes to itself.
  bool allow_special = false;
};

// Thread-safe: never changes after Load. Time is n log n in the length of any text.
class Tokenizer {
 public:
  // Reads tokenizer.json in the folder, or else tokenizer.model (SentencePiece BPE), with
  // tokenizer_config.json beside it if there is one. NotFound if the folder has neither: such a
  // checkpoint is served by token ids. InvalidArgument for a broken file and Unimplemented for a
  // kind of tokenizer that is not known, both with the place.
  static absl::StatusOr<std::unique_ptr<Tokenizer>> Load(const std::string& model_dir);

  ~Tokenizer();

  // `add_bos` puts in front what the file or its configuration names; InvalidArgument if they name
  // nothing. InvalidArgument for invalid UTF-8, with segment and byte offset. NUL is a character
  // like others; empty text is no tokens.
  absl::StatusOr<std::vector<TokenId>> Encode(std::span<const Segment> segments,
                                              bool add_bos) const;

  // The text of ids that begin a text. Always well-formed UTF-8: bytes that are not become U+FFFD.
  // Ids without a token are left out, as are special tokens if asked.
  std::string Decode(std::span<const TokenId> ids, bool skip_special) const;

  // One more than the largest id; not every id below need have a token.
  int vocab_size() const;
  // Whether the file marks the token as special. False for ids outside.
  bool IsSpecial(TokenId id) const;
  // By the spelling in the file: "<|im_end|>", "Ġthe".
  std::optional<TokenId> TokenToId(std::string_view spelling) const;
  // The bytes that the token stands for, not always whole characters. Empty for ids outside.
  std::string_view TokenBytes(TokenId id) const;

  std::optional<TokenId> bos_id() const;
  std::optional<TokenId> eos_id() const;
  // Whether this checkpoint's prompts begin with BOS.
  bool add_bos_by_default() const;

  // Decoded text loses at most leading_strip_count() of leading_strip() at its start; how some
  // vocabularies undo the space that encoding puts in front.
  char leading_strip() const;
  int leading_strip_count() const;

 private:
  struct Impl;
  explicit Tokenizer(std::unique_ptr<const Impl> impl);

  std::unique_ptr<const Impl> impl_;
};

}  // namespace writescope::tokenizer
