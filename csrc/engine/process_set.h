// One process set on one rank: who is in it, what is pending, and the machines that agree and
// execute.
#pragma once

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "controller/negotiator.h"
#include "engine/executor.h"

namespace horoplug {

struct ProcessSet {
  // `place`: in the set's own tree, with global ranks.
  ProcessSet(MembersPtr ranks, std::unique_ptr<SharedGroup> group, TreePosition place,
             Negotiator::Options options, std::unique_ptr<Comm> comm, Executor::Forced forced)
      : members(std::move(ranks)),
        shared(std::move(group)),
        negotiator(members->set, std::move(place), options),
        executor(members->set, std::move(comm), std::move(forced)) {}

  const MembersPtr members;
  // The members on this host: all of them, or as many as on every other one; nullptr otherwise.
  const std::unique_ptr<SharedGroup> shared;
  Negotiator negotiator;
  Executor executor;
  std::unordered_map<std::string, OperationPtr> pending;  // submitted and not decided
  double last_progress = 0;                               // of the running batch
  double last_event = 0;       // something was submitted, decided or done
  double plan_patience = 0.1;  // for what the plan holds up and nobody waits for
  bool asked_to_leave = false;
  std::size_t memory_at = 0;  // where this rank's part of the shared memory begins in its segment
  OperationPtr removal;       // remove_process_set, until nothing of the set runs any more
};

}  // namespace horoplug
