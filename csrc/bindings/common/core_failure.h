// How TensorFlow and XLA report a failure of the core. Their codes have the same numbers. As in
// Horovod, a broken job is an unknown error, and a mismatch between ranks a failed precondition.
#pragma once

#include <string>

#include "horoplug/horoplug.h"

namespace horoplug::bindings {

struct CoreFailure {
  int code;
  std::string message;
};

// `reason`: the core's message. The text before it marks failures of all ranks: beside the code,
// which the frameworks use too, it is all that reaches horoplug/common/status.py.
inline CoreFailure core_failure(hp_status status, const std::string& reason) {
  constexpr int kUnknown = 2, kInvalidArgument = 3, kFailedPrecondition = 9, kInternal = 13;
  const std::string message = "a Horovod operation has failed: " + reason;
  switch (status) {
    case HP_INVALID_ARGUMENT:
    case HP_DUPLICATE_NAME:
    case HP_UNSUPPORTED:
      return {kInvalidArgument, reason};
    case HP_MISMATCH:
    case HP_LAYOUT_MISMATCH:
    case HP_DEADLOCK:
      return {kFailedPrecondition, message};
    case HP_INTERNAL:
      return {kInternal, message};
    default:
      return {kUnknown, message};
  }
}

}  // namespace horoplug::bindings
