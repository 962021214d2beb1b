// Copies the results of an eager call to XLA's output arrays.
#pragma once

#include "xla_ffi.h"

namespace horoplug::jax {

// Throws Failure.
void copy_results(const xla::CallFrame& frame);

}  // namespace horoplug::jax
