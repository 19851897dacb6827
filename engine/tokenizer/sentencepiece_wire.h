// Reads SentencePiece's tokenizer.model without a protobuf library. The part of its format that
// matters here, in the notation of Protocol Buffers (version 2 syntax; all other fields are
// skipped):
//
//   message ModelProto {
//     message SentencePiece {
//       enum Type { NORMAL = 1; UNKNOWN = 2; CONTROL = 3; USER_DEFINED = 4; UNUSED = 5; BYTE = 6; }
//       optional string piece = 1;
//       optional float score = 2;
//       optional Type type = 3 [default = NORMAL];
//     }
//     repeated SentencePiece pieces = 1;
//     optional TrainerSpec trainer_spec = 2;
//     optional NormalizerSpec normalizer_spec = 3;
//   }
//   message TrainerSpec {
//     enum ModelType { UNIGRAM = 1; BPE = 2; WORD = 3; CHAR = 4; }
//     optional ModelType model_type = 3 [default = UNIGRAM];
//     optional bool treat_whitespace_as_suffix = 24 [default = false];
//     optional bool byte_fallback = 35 [default = false];
//     optional int32 unk_id = 40 [default = 0];
//     optional int32 bos_id = 41 [default = 1];  // -1: none.
//     optional int32 eos_id = 42 [default = 2];
//   }
//   message NormalizerSpec {
//     optional string name = 1;
//     optional bytes precompiled_charsmap = 2;
//     optional bool add_dummy_prefix = 3 [default = true];
//     optional bool remove_extra_whitespaces = 4 [default = true];
//     optional bool escape_whitespaces = 5 [default = true];
//   }
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace writescope::tokenizer {

struct SentencePieceModel {
  enum class Type { kNormal = 1, kUnknown, kControl, kUserDefined, kUnused, kByte };
  struct Piece {
    std::string text;
    float score = 0;
    Type type = Type::kNormal;
  };
  static constexpr int64_t kBpe = 2;

  std::vector<Piece> pieces;
  int64_t model_type = 1;
  bool treat_whitespace_as_suffix = false;
  bool byte_fallback = false;
  int64_t unk_id = 0;
  int64_t bos_id = 1;
  int64_t eos_id = 2;
  std::string charsmap;
  bool add_dummy_prefix = true;
  bool remove_extra_whitespaces = true;
  bool escape_whitespaces = true;
};

// InvalidArgument, with the byte offset, for bytes that are not such a message. Any bytes are safe.
absl::StatusOr<SentencePieceModel> ParseSentencePieceModel(std::string_view bytes);

}  // namespace writescope::tokenizer
