// RETURN_IF_ERROR and ASSIGN_OR_RETURN: pass a failed absl::Status to the caller.
#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define RETURN_IF_ERROR(expression)                                         \
  do {                                                                      \
    if (absl::Status _status = (expression); !_status.ok()) return _status; \
  } while (false)

#define WRITESCOPE_CONCAT_INNER(a, b) a##b
#define WRITESCOPE_CONCAT(a, b) WRITESCOPE_CONCAT_INNER(a, b)
#define ASSIGN_OR_RETURN(lhs, expression) \
  WRITESCOPE_ASSIGN_OR_RETURN(WRITESCOPE_CONCAT(_status_or_, __LINE__), lhs, expression)
#define WRITESCOPE_ASSIGN_OR_RETURN(result, lhs, expression) \
  auto result = (expression);                                \
  if (!result.ok()) return std::move(result).status();       \
  lhs = *std::move(result)
