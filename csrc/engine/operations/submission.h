// Validates a caller's submission and turns it into an Operation.
#pragma once

#include <span>
#include <vector>

#include "engine/operations/operation.h"

namespace horoplug {

// What all submissions of one operation have in common: everything but the tensors' memory and what
// depends on the calling thread.
struct Prepared {
  MembersPtr members;  // the process set, which contains this rank
  IdentityPtr identity;
  int gpu = -1;  // its ordinal
  std::int32_t tag = 0;
  std::vector<std::int64_t> splits{};  // see Operation
};

// Checks all of a submission but the memory of its tensors. Throws
// Error(HP_INVALID_ARGUMENT or HP_UNSUPPORTED) with a line that says what to do. The name is empty
// if the submission has none.
Prepared prepare(const hp_submission& submission, const MembersPtr& members);
// A submission of it. `tensors`: as many as the signature has shapes. `stream`: see
// hp_submission. `in_pool`: the calling thread belongs to a pool.
OperationPtr make_operation(const Prepared& prepared, std::span<const TensorArgument> tensors,
                            void* stream, bool in_pool);
OperationPtr make_operation(const hp_submission& submission, const MembersPtr& members);

// An operation on the job or on a set itself (see is_administrative). `arguments`: the ranks
// (kAddSet), the number of the set (kRemoveSet, kReleaseSet), the size in bytes (kAddBuffer).
// `members`: all ranks.
OperationPtr make_administrative(OpKind op, const MembersPtr& members, const Shape& arguments);

// The operation by which a rank that has joined takes part in other ranks' operations. Throws
// Error(HP_INTERNAL) if the signature, which another rank has sent, is invalid.
OperationPtr make_absent(const Identity& identity, const MembersPtr& members);

}  // namespace horoplug
