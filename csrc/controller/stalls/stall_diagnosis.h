// What the answers of all ranks to a stall inspection mean: a stall (some ranks have not submitted
// an operation that others wait for, and may still be computing) or a deadlock (every rank is
// blocked, so that no rank is left to submit it). A rank is blocked if all its threads are that
// submit operations. If some are not, they may still submit what others wait for, and the deadlock
// is only possible.
//
// Operations of other groups of the same processes take part in deadlocks, since ranks may wait for
// each other in different groups. What concerns one other group alone is left to that group.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "controller/messages/messages.h"

namespace horoplug {

struct DiagnoseOptions {
  std::map<std::uint32_t, std::vector<int>> members;  // by process set; ranks ascending
  // an operation that has waited for this long is a stall
  Seconds stall_time{60};
  // Whether ranks that are blocked and quiet, and that wait only for each other, are in a deadlock.
  bool finds_deadlocks = true;
  // an operation that has taken this long fails the job
  Seconds overdue_time = kForever;
};

struct Diagnosis {
  // Operations that some ranks wait for, with the missing ranks; longest wait first.
  struct Stall {
    std::uint32_t set;
    std::string name;
    Seconds age;
    std::string text;
  };
  std::vector<Stall> stalls;
  std::optional<std::string> deadlock;
  std::vector<std::uint32_t> deadlocked_sets;  // sets whose pending operations must fail
  // Those of other groups: an operation of each set, and a rank that waits for it.
  std::vector<std::pair<OperationKey, int>> deadlocked_elsewhere;
  // Ranks wait for each other, but have threads that do not wait.
  std::optional<std::string> possible_deadlock;
  std::optional<std::string> overdue;
};

// `report`: the answers of all ranks to the second question.
Diagnosis diagnose(const Report& report, const DiagnoseOptions& options);

}  // namespace horoplug
