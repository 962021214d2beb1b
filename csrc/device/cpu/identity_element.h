// The element that changes nothing in a reduction.
#pragma once

#include <cstdint>

#include "base/types.h"

namespace horoplug {

// Its bytes are the first dtype_size(dtype) of the result. Sum, Average and Adasum: 0; Product: 1;
// Min and Max: infinity for floats, the type's limit for integers. For bool, Product and Min are
// "and" (true), the others "or" (false).
std::uint64_t neutral_element(ReduceOp op, DType dtype);

}  // namespace horoplug
