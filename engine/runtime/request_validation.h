// What a request may ask for. Pure.
#pragma once

#include <vector>

#include "absl/status/status.h"
#include "engine/runtime/engine.h"
#include "engine/runtime/request.h"

namespace writescope::runtime {

// Everything that does not need the prompt's tokens. INVALID_ARGUMENT with a reason
// (error_reason.h) and the parameter's name, value and range.
absl::Status ValidateRequest(const GenerateRequest& request, const ModelInfo& model);

// The prompt itself: not empty, ids in the vocabulary, room in the context.
absl::Status ValidatePrompt(const std::vector<TokenId>& tokens, const GenerateRequest& request,
                            const ModelInfo& model);

}  // namespace writescope::runtime
