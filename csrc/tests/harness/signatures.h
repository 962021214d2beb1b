// Signatures of operations on one tensor with one dimension, and names of operations.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "controller/state/identity.h"

namespace horoplug::testing {

inline Signature signature_of(OpKind op = OpKind::kAllreduce, std::int64_t elements = 4,
                              DType dtype = DType::kFloat32) {
  Signature signature;
  signature.op = op;
  signature.dtype = dtype;
  signature.shapes = {{elements}};
  return signature;
}

// The names of operations.
inline std::vector<std::string> names_of(std::span<const IdentityPtr> operations) {
  std::vector<std::string> names;
  for (const IdentityPtr& operation : operations) names.push_back(operation->name);
  return names;
}

inline Signature sum_of(std::int64_t elements) {
  return signature_of(OpKind::kAllreduce, elements);
}

}  // namespace horoplug::testing
