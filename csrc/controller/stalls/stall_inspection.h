// Determines the state of every rank when an operation has waited for long. It costs nothing
// before.
//
// The root of the tree asks twice, and every rank answers. The first answers name the operations
// that the second question is about: so the messages are small, however many operations are
// pending. diagnose() (stall_diagnosis.h) interprets the second answers. Both are without I/O or
// clocks, like the negotiator.
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "controller/messages/messages.h"
#include "controller/stalls/stall_report.h"
#include "controller/state/topology.h"

namespace horoplug {

class StallInspection {
 public:
  struct Outgoing {
    int to;
    Bytes message;
  };

  explicit StallInspection(TreePosition position) : position_(std::move(position)) {}

  // Root: asks every rank, unless an inspection is in progress. `quiet`: a rank without events for
  // this long is quiet.
  void begin(Seconds quiet);
  // Handles a question or an answer from another rank. Throws WireError if it is invalid.
  void receive(int from, InspectionQuestion question);
  void receive(int from, Report report);

  // A question has reached this rank: the caller must call answer() with the rank's state, and look
  // again, since a root without other ranks asks the second question at once.
  bool wants_answer() const { return wants_answer_; }
  void answer(const RankReport& report);

  // Root: the second answers of all ranks, returned once, when they are complete.
  std::optional<Report> take_result();
  bool running() const { return running_; }
  // Root: the ranks that have not answered the last question.
  std::vector<int> unanswered() const;

  std::vector<Outgoing> take_outgoing() { return std::exchange(outgoing_, {}); }

 private:
  void ask(InspectionQuestion question);
  void check(std::size_t child, const Report& report) const;
  void finish_if_complete();
  void finish_at_root(Report report);

  const TreePosition position_;
  bool running_ = false;
  bool wants_answer_ = false;
  InspectionQuestion question_;  // the last one
  ReportMerge merge_;            // of the answers to it
  std::vector<bool> answered_;   // by child
  std::optional<Report> result_;
  std::vector<Outgoing> outgoing_;
};

}  // namespace horoplug
