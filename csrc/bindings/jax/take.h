// Brings the results of an operation with a ticket to arrays of XLA's.
#pragma once

#include "xla_ffi.h"

namespace horoplug::jax {

// Throws Failure.
void take_results(const xla::CallFrame& frame);

}  // namespace horoplug::jax
