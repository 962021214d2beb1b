// The answers to the questions of a stall inspection: of one rank, and of a subtree.
#pragma once

#include <map>

#include "controller/messages/messages.h"

namespace horoplug {

// The answer of one rank. To the first question a rank names those of its operations for which a
// thread waits and those that have been pending for longest, a few of each. To the second one it
// tells its part in the operations that are named there, in ascending order.
Report answer_of(const RankReport& rank, const InspectionQuestion& question);

// Merges the answers of the ranks of a subtree.
class ReportMerge {
 public:
  explicit ReportMerge(std::uint64_t question = 0) { merged_.question = question; }

  void add(Report report);
  // The merged report. If it would name more than a report may, operations for which a thread waits
  // are kept first, then those that have been pending for longest.
  Report take();

 private:
  Report merged_;  // all but `pending`
  std::map<OperationKey, Report::Pending> pending_;
};

}  // namespace horoplug
