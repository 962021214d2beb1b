// Finds out what every rank is doing, when somebody has waited for long: nothing of this costs
// anything before.
//
// The root of the tree asks, everyone answers, and diagnose() says what is wrong: a stall (some
// ranks have not submitted what others wait for, and may still be computing) or a deadlock (every
// rank is blocked, so that nobody is left who could submit it). Both are state machines without I/O
// or clocks, like the negotiator.
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

  // Root: asks everyone, unless a inspection is under way.
  void begin();
  // A question or an answer from another rank; WireError if it cannot be right.
  void receive_inspection(int from, std::uint64_t inspection);
  void receive(int from, Report report);

  // A question has reached this rank and wants answer() to be called with what it is doing.
  bool wants_answer() const { return wants_answer_; }
  void answer(RankReport report);

  // Root: the answers of all ranks, once, when they are complete.
  std::optional<Report> take_result();
  bool running() const { return running_; }
  // Root: the ranks whose answers are still missing.
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
  std::map<std::uint32_t, std::vector<int>> members;  // of the process sets, ascending
  double stall_time = 60;  // an operation waited for this long is a stall; negative: never
  // Ranks blocked and quiet this long that wait only for each other are in a deadlock; negative:
  // never.
  double deadlock_time = 5;
  double overdue_time = -1;  // an operation that has taken this long fails the job; negative: never
};

struct Diagnosis {
  // Operations that some ranks wait for, with who is missing and since when; longest wait first.
  struct Stall {
    std::uint32_t set;
    std::string name;
    double age;
    std::vector<int> missing;
    std::string text;
  };
  std::vector<Stall> stalls;
  std::optional<std::string> deadlock;
  std::vector<std::uint32_t> deadlocked_sets;  // whose pending operations have to be called off
  std::optional<std::string> overdue;
};

Diagnosis diagnose(const Report& report, const DiagnoseOptions& options);

}  // namespace horoplug
