// The identity element of a reduction: op(identity, x) == x.
#pragma once

#include <cstdint>

#include "base/types.h"

namespace horoplug {

// The first bytes of the result are the element; further bytes of an element of 16 are 0. Sum,
// Average and Adasum: 0; Product: 1; Min and Max: infinity for floats that have it, the type's
// limit otherwise; nothing for complex numbers. For bool, Product and Min are "and" (true), the
// others "or" (false).
std::uint64_t identity_element(ReduceOp op, DType dtype);

}  // namespace horoplug
