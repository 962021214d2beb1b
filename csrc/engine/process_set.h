// One process set on one rank: who is in it, what is pending, and the machines that agree and
// execute.
#pragma once

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/executor.h"
#include "engine/negotiator.h"

namespace horoplug {

struct ProcessSet {
  ProcessSet(std::uint32_t number, std::vector<int> ranks, std::unique_ptr<SharedGroup> group,
             TreePlace place, Negotiator::Options options, std::unique_ptr<Comm> comm,
             const std::string& algorithm)
      : id(number),
        members(std::move(ranks)),
        shared(std::move(group)),
        negotiator(number, std::move(place), options),
        executor(number, std::move(comm), algorithm) {}

  const std::uint32_t id;
  const std::vector<int> members;             // global ranks
  const std::unique_ptr<SharedGroup> shared;  // nullptr if the set spans hosts
  Negotiator negotiator;
  Executor executor;
  std::unordered_map<std::string, OperationPtr> pending;  // submitted and not decided
  double last_progress = 0;                               // of the running batch
};

}  // namespace horoplug
