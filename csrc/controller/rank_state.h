// What one rank knows of the operations of a process set that are negotiated. It changes with
// submissions, with the announcements of the rank's children, and with decisions.
#pragma once

#include "controller/name_table.h"
#include "controller/pending_operations.h"
#include "controller/readiness.h"
#include "controller/topology.h"

namespace horoplug {

struct RankState {
  // `position` must outlive the state.
  explicit RankState(const TreePosition& position) : readiness(position) {}

  NameTable names;            // equal on all ranks
  PendingOperations pending;  // submitted here
  ReadinessTable readiness;   // submitted in the subtree
};

}  // namespace horoplug
