// Validates a caller's submission and turns it into an Operation.
#pragma once

#include "engine/operations/operation.h"

namespace horoplug {

// Throws Error(HP_INVALID_ARGUMENT or HP_UNSUPPORTED) with a line that says what to do. The
// operation's name is empty if the submission has none. `members`: the process set, which contains
// this rank.
OperationPtr make_operation(const hp_submission& submission, const MembersPtr& members);

// An operation on the job or on a set itself (see is_administrative). `arguments`: the ranks
// (kAddSet), the number of the set (kRemoveSet, kReleaseSet), the size in bytes (kAddBuffer).
// `members`: all ranks.
OperationPtr make_administrative(OpKind op, const MembersPtr& members, const Shape& arguments);

// The operation by which a rank that has joined takes part in other ranks' operations. Throws
// Error(HP_INTERNAL) if the signature, which another rank has sent, is invalid.
OperationPtr make_absent(const std::string& name, const Signature& signature,
                         const MembersPtr& members);

}  // namespace horoplug
