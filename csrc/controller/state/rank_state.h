// What one rank knows of the operations of a process set that are negotiated. It changes with
// submissions, with the announcements of the rank's children, and with decisions.
#pragma once

#include "controller/state/name_table.h"
#include "controller/state/pending_operations.h"
#include "controller/state/readiness.h"
#include "controller/state/topology.h"

namespace horoplug {

struct RankState {
  // `position` must outlive the state.
  explicit RankState(const TreePosition& position) : readiness(position) {}

  NameTable names;            // equal on all ranks
  PendingOperations pending;  // submitted here
  ReadinessTable readiness;   // submitted in the subtree
};

}  // namespace horoplug
