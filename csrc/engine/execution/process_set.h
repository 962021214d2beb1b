// One process set on one rank: its members, its pending operations, its negotiator and its
// executor. Used by the thread that runs the loop.
#pragma once

#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/running_clock.h"
#include "controller/negotiator.h"
#include "engine/execution/executor.h"

namespace horoplug {

struct ProcessSet {
  // `position`: in the set's own tree, with global ranks.
  ProcessSet(MembersPtr ranks, std::unique_ptr<HostMemory> memory, TreePosition position,
             const Negotiator::Options& options, std::unique_ptr<Comm> comm,
             Executor::Forced forced)
      : members(std::move(ranks)),
        host_memory(std::move(memory)),
        negotiator(members->set, std::move(position), options),
        executor(members->set, std::move(comm), std::move(forced)) {}

  // Takes all operations that are pending.
  std::vector<OperationPtr> take_pending() {
    std::vector<OperationPtr> operations;
    for (auto& [name, operation] : pending) operations.push_back(std::move(operation));
    pending.clear();
    return operations;
  }

  const MembersPtr members;
  // The members on this host, if every host of the set has equally many; nullptr otherwise.
  const std::unique_ptr<HostMemory> host_memory;
  Negotiator negotiator;
  Executor executor;
  std::unordered_map<std::string, OperationPtr> pending;  // submitted and not decided, by name
  RunningTime last_progress;    // of the running batch; the present time if none runs
  RunningTime last_wake_up;     // when peers that the running batch waits for were woken last
  RunningTime last_event;       // an operation was submitted, decided or done
  Seconds plan_patience{0.1};   // how long a plan may hold up operations that nobody waits for
  bool asked_to_leave = false;  // the negotiator knows that this rank leaves
  Status end_of_transfers;      // not HP_OK: sends and recvs are not accepted any more
  std::size_t memory_at = 0;    // the offset of this rank's part of the shared memory
  OperationPtr removal;  // the operation that removes the set, until nothing of it runs any more
};

}  // namespace horoplug
