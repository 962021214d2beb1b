// Checks what a caller has handed over and turns it into an Operation; nothing wrong gets past
// here.
#pragma once

#include "engine/operation.h"

namespace horoplug {

// Throws Error(HP_INVALID_ARGUMENT or HP_UNSUPPORTED) with a line that says what to do. The name is
// left empty if the submission has none. `rank` and `size` are the caller's within the process set.
OperationPtr make_operation(const hp_submission& submission, int size);

}  // namespace horoplug
