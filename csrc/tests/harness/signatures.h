// Signatures of operations on one tensor with one dimension.
#pragma once

#include <cstdint>

#include "controller/state/signature.h"

namespace horoplug::testing {

inline Signature signature_of(OpKind op = OpKind::kAllreduce, std::int64_t elements = 4,
                              DType dtype = DType::kFloat32) {
  Signature signature;
  signature.op = op;
  signature.dtype = dtype;
  signature.shapes = {{elements}};
  return signature;
}

inline Signature sum_of(std::int64_t elements) {
  return signature_of(OpKind::kAllreduce, elements);
}

}  // namespace horoplug::testing
