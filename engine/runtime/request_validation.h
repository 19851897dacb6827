// What a request may ask for. Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "engine/runtime/engine.h"
#include "engine/runtime/request.h"

namespace writescope::runtime {

// Everything that does not need the prompt's tokens. INVALID_ARGUMENT with a reason and metadata
// (error_reason.h), and a message of the parameter's name, value and range.
absl::Status ValidateRequest(const GenerateRequest& request, const ModelInfo& model);

// The prompt itself: not empty, ids in the vocabulary, room in the context.
absl::Status ValidatePrompt(const std::vector<TokenId>& tokens, const GenerateRequest& request,
                            const ModelInfo& model);
// Of these, what its length says.
absl::Status ValidateLength(int64_t prompt_tokens, const GenerateRequest& request,
                            const ModelInfo& model);

// The error for an id outside the model's vocabulary, in the API's field of this path. `bytes` are
// the token's where the id comes from text: the tokenizer's vocabulary is the larger one.
absl::Status InvalidTokenId(TokenId id, size_t position, int vocab_size, std::string_view field,
                            std::string_view bytes = "");

}  // namespace writescope::runtime
