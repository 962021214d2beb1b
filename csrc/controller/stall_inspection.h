// Determines the state of every rank when an operation has waited for long. It costs nothing
// before.
//
// The root of the tree asks, every rank answers, and diagnose() interprets the answers: a stall
// (some ranks have not submitted an operation that others wait for, and may still be computing) or
// a deadlock (every rank is blocked, so that no rank is left to submit it). A rank is blocked if
// all its threads are that submit operations. If some are not, they may still submit what others
// wait for, and the deadlock is only possible. Both are state machines without I/O or clocks, like
// the negotiator.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "controller/messages.h"
#include "controller/topology.h"

namespace horoplug {

class StallInspection {
 public:
  struct Outgoing {
    int to;
    Bytes message;
  };

  explicit StallInspection(TreePosition position) : position_(std::move(position)) {}

  // Root: asks every rank, unless an inspection is in progress.
  void begin();
  // Handles a question or an answer from another rank. Throws WireError if it is invalid.
  void receive_inspection(int from, std::uint64_t inspection);
  void receive(int from, Report report);

  // A question has reached this rank: the caller must call answer() with the rank's state.
  bool wants_answer() const { return wants_answer_; }
  void answer(RankReport report);

  // Root: the answers of all ranks, returned once, when they are complete.
  std::optional<Report> take_result();
  bool running() const { return running_; }
  // Root: the ranks that have not answered.
  std::vector<int> unanswered() const;

  std::vector<Outgoing> take_outgoing() { return std::exchange(outgoing_, {}); }

 private:
  void ask(std::uint64_t inspection);
  void finish_if_complete();

  const TreePosition position_;
  bool running_ = false;
  bool wants_answer_ = false;
  bool complete_ = false;
  std::uint64_t last_inspection_ = 0;
  Report report_;
  std::vector<bool> answered_;  // by child
  std::vector<Outgoing> outgoing_;
};

struct DiagnoseOptions {
  std::map<std::uint32_t, std::vector<int>> members;  // by process set; ranks ascending
  // an operation that has waited for this many seconds is a stall; negative: never
  double stall_time = 60;
  // Ranks that have been blocked and quiet for this many seconds, and that wait only for each
  // other, are in a deadlock; negative: never.
  double deadlock_time = 5;
  // an operation that has taken this many seconds fails the job; negative: never
  double overdue_time = -1;
};

struct Diagnosis {
  // Operations that some ranks wait for, with the missing ranks; longest wait first.
  struct Stall {
    std::uint32_t set;
    std::string name;
    double age;
    std::vector<int> missing;
    std::string text;
  };
  std::vector<Stall> stalls;
  std::optional<std::string> deadlock;
  std::vector<std::uint32_t> deadlocked_sets;  // sets whose pending operations must fail
  // Ranks wait for each other, but have threads that do not wait.
  std::optional<std::string> possible_deadlock;
  std::optional<std::string> overdue;
};

Diagnosis diagnose(const Report& report, const DiagnoseOptions& options);

}  // namespace horoplug
