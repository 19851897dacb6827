#include "engine/tokenizer/sentencepiece_wire.h"

#include <cstring>
#include <functional>
#include <utility>

#include "absl/status/status.h"
#include "engine/base/status_macros.h"
#include "engine/tokenizer/strings.h"

namespace writescope::tokenizer {
namespace {

enum class WireType { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

struct Field {
  uint32_t number = 0;
  WireType type = WireType::kVarint;
  uint64_t value = 0;       // Varint and fixed fields.
  std::string_view bytes;   // kBytes only.
  size_t bytes_offset = 0;  // Of `bytes` within the file.

  bool AsBool() const { return value != 0; }
  int64_t AsInt() const { return static_cast<int64_t>(value); }
  float AsFloat() const {
    const auto bits = static_cast<uint32_t>(value);
    float result = 0;
    std::memcpy(&result, &bits, sizeof(result));
    return result;
  }
};

// Walks over the fields of one message.
class MessageReader {
 public:
  // `offset` is that of `bytes` in the file, for error texts.
  MessageReader(std::string_view bytes, size_t offset) : bytes_(bytes), offset_(offset) {}

  bool AtEnd() const { return pos_ == bytes_.size(); }

  absl::StatusOr<Field> Next() {
    ASSIGN_OR_RETURN(const uint64_t tag, ReadVarint());
    Field field;
    if (tag >> 3 == 0 || tag >> 3 > 0x1FFFFFFF) return Malformed("a bad field number");
    field.number = static_cast<uint32_t>(tag >> 3);
    field.type = static_cast<WireType>(tag & 7);
    switch (field.type) {
      case WireType::kVarint: {
        ASSIGN_OR_RETURN(field.value, ReadVarint());
        return field;
      }
      case WireType::kFixed64: {
        ASSIGN_OR_RETURN(field.value, ReadFixed(8));
        return field;
      }
      case WireType::kFixed32: {
        ASSIGN_OR_RETURN(field.value, ReadFixed(4));
        return field;
      }
      case WireType::kBytes: {
        ASSIGN_OR_RETURN(const uint64_t size, ReadVarint());
        if (size > bytes_.size() - pos_) {
          return Malformed(
              Cat("a field of ", size, " bytes where ", bytes_.size() - pos_, " are left"));
        }
        field.bytes = bytes_.substr(pos_, size);
        field.bytes_offset = offset_ + pos_;
        pos_ += size;
        return field;
      }
    }
    return Malformed(Cat("wire type ", tag & 7));
  }

 private:
  absl::Status Malformed(std::string_view what) const {
    return absl::InvalidArgumentError(
        Cat("not a SentencePiece model: ", what, " at byte ", offset_ + pos_));
  }

  absl::StatusOr<uint64_t> ReadVarint() {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      if (AtEnd()) return Malformed("the file ends inside a number");
      const auto byte = static_cast<unsigned char>(bytes_[pos_++]);
      value |= uint64_t{byte & 0x7Fu} << shift;
      if (byte < 0x80) return value;
    }
    return Malformed("a number of more than ten bytes");
  }

  absl::StatusOr<uint64_t> ReadFixed(size_t size) {
    if (bytes_.size() - pos_ < size) return Malformed("the file ends inside a number");
    uint64_t value = 0;
    for (size_t i = 0; i < size; ++i) {
      value |= uint64_t{static_cast<unsigned char>(bytes_[pos_++])} << (8 * i);
    }
    return value;
  }

  const std::string_view bytes_;
  const size_t offset_;
  size_t pos_ = 0;
};

using FieldHandler = std::function<absl::Status(const Field&)>;

absl::Status ForEachField(std::string_view bytes, size_t offset, const FieldHandler& handle) {
  MessageReader reader(bytes, offset);
  while (!reader.AtEnd()) {
    ASSIGN_OR_RETURN(const Field field, reader.Next());
    RETURN_IF_ERROR(handle(field));
  }
  return absl::OkStatus();
}

absl::Status CheckType(const Field& field, WireType expected, std::string_view name) {
  if (field.type == expected) return absl::OkStatus();
  return absl::InvalidArgumentError(Cat("not a SentencePiece model: field ", name,
                                        " has wire type ", static_cast<int>(field.type), ", not ",
                                        static_cast<int>(expected)));
}

absl::Status ReadPiece(const Field& message, SentencePieceModel* model) {
  RETURN_IF_ERROR(CheckType(message, WireType::kBytes, "pieces"));
  SentencePieceModel::Piece piece;
  const auto handle = [&](const Field& field) -> absl::Status {
    switch (field.number) {
      case 1:
        RETURN_IF_ERROR(CheckType(field, WireType::kBytes, "piece"));
        piece.text = field.bytes;
        break;
      case 2:
        RETURN_IF_ERROR(CheckType(field, WireType::kFixed32, "score"));
        piece.score = field.AsFloat();
        break;
      case 3:
        RETURN_IF_ERROR(CheckType(field, WireType::kVarint, "type"));
        if (field.value < 1 || field.value > 6) {
          return absl::InvalidArgumentError(
              Cat("piece ", model->pieces.size(), " has the unknown type ", field.value));
        }
        piece.type = static_cast<SentencePieceModel::Type>(field.value);
        break;
      default:
        break;
    }
    return absl::OkStatus();
  };
  RETURN_IF_ERROR(ForEachField(message.bytes, message.bytes_offset, handle));
  model->pieces.push_back(std::move(piece));
  return absl::OkStatus();
}

absl::Status ReadTrainerSpec(const Field& message, SentencePieceModel* model) {
  RETURN_IF_ERROR(CheckType(message, WireType::kBytes, "trainer_spec"));
  const auto handle = [&](const Field& field) -> absl::Status {
    int64_t number = 0;
    bool flag = false;
    switch (field.number) {
      case 3:
      case 24:
      case 35:
      case 40:
      case 41:
      case 42:
        RETURN_IF_ERROR(CheckType(field, WireType::kVarint, "of trainer_spec"));
        number = field.AsInt();
        flag = field.AsBool();
        break;
      default:
        return absl::OkStatus();
    }
    switch (field.number) {
      case 3:
        model->model_type = number;
        break;
      case 24:
        model->treat_whitespace_as_suffix = flag;
        break;
      case 35:
        model->byte_fallback = flag;
        break;
      case 40:
        model->unk_id = number;
        break;
      case 41:
        model->bos_id = number;
        break;
      default:
        model->eos_id = number;
        break;
    }
    return absl::OkStatus();
  };
  return ForEachField(message.bytes, message.bytes_offset, handle);
}

absl::Status ReadNormalizerSpec(const Field& message, SentencePieceModel* model) {
  RETURN_IF_ERROR(CheckType(message, WireType::kBytes, "normalizer_spec"));
  const auto handle = [&](const Field& field) -> absl::Status {
    if (field.number == 2) {
      RETURN_IF_ERROR(CheckType(field, WireType::kBytes, "precompiled_charsmap"));
      model->charsmap = field.bytes;
      return absl::OkStatus();
    }
    if (field.number < 3 || field.number > 5) return absl::OkStatus();
    RETURN_IF_ERROR(CheckType(field, WireType::kVarint, "of normalizer_spec"));
    if (field.number == 3) model->add_dummy_prefix = field.AsBool();
    if (field.number == 4) model->remove_extra_whitespaces = field.AsBool();
    if (field.number == 5) model->escape_whitespaces = field.AsBool();
    return absl::OkStatus();
  };
  return ForEachField(message.bytes, message.bytes_offset, handle);
}

}  // namespace

absl::StatusOr<SentencePieceModel> ParseSentencePieceModel(std::string_view bytes) {
  SentencePieceModel model;
  const auto handle = [&](const Field& field) -> absl::Status {
    switch (field.number) {
      case 1:
        return ReadPiece(field, &model);
      case 2:
        return ReadTrainerSpec(field, &model);
      case 3:
        return ReadNormalizerSpec(field, &model);
      default:
        return absl::OkStatus();
    }
  };
  RETURN_IF_ERROR(ForEachField(bytes, 0, handle));
  if (model.pieces.empty()) {
    return absl::InvalidArgumentError("not a SentencePiece model: it holds no pieces");
  }
  return model;
}

}  // namespace writescope::tokenizer
