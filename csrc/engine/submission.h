// Checks what a caller has handed over and turns it into an Operation; nothing wrong gets past
// here.
#pragma once

#include "engine/operation.h"

namespace horoplug {

// Throws Error(HP_INVALID_ARGUMENT or HP_UNSUPPORTED) with a line that says what to do. The name is
// left empty if the submission has none. `members`: the process set, which this rank is in.
OperationPtr make_operation(const hp_submission& submission, const MembersPtr& members);

// An operation on the job or a set itself (see is_administrative). kAddSet: `arguments` are the
// ranks, kRemoveSet: the number of the set, kAddBuffer: its size; `members` are all ranks.
OperationPtr make_administrative(OpKind op, const MembersPtr& members, const Shape& arguments);

// What this rank does in an operation of the others after it has joined. Throws Error(HP_INTERNAL)
// if the signature, which came off the wire, makes no sense.
OperationPtr make_absent(const std::string& name, const Signature& signature,
                         const MembersPtr& members);

}  // namespace horoplug
