// SentencePiece's normalisation: a map of character sequences compiled to a double-array trie,
// then its treatment of white space.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "engine/tokenizer/normalizer.h"
#include "engine/tokenizer/sentencepiece_wire.h"

namespace writescope::tokenizer {

// `prefix_every_piece`: every text between control tokens gets the dummy prefix, not only text at
// the start of the input ("legacy" in tokenizer_config.json). InvalidArgument for a broken map.
absl::StatusOr<std::unique_ptr<const Normalizer>> MakeSentencePieceNormalizer(
    const SentencePieceModel& model, bool prefix_every_piece);

}  // namespace writescope::tokenizer
