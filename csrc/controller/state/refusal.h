// Why an operation that is complete cannot run.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "controller/state/signature.h"

namespace horoplug {

// The error of an operation that all ranks have submitted, apart from the ranks in `absent`, which
// have joined. HP_OK if the operation can run. `variants`: as in ReadinessTable::Complete.
//
// Signatures that differ are a mismatch. An operation cannot leave out a rank that has joined if
// this rank is its root, or if the operation is administrative.
Status refusal(const std::string& name, const Signature& signature,
               const std::vector<Variant>& variants, const RankRanges& absent);

}  // namespace horoplug
