#include "controller/stalls/stall_inspection.h"

#include <algorithm>

namespace horoplug {

void StallInspection::begin(Seconds quiet) {
  if (running_) return;
  ask({question_.number + 1, quiet, false, {}});
}

void StallInspection::ask(InspectionQuestion question) {
  question_ = std::move(question);
  std::sort(question_.operations.begin(), question_.operations.end());
  running_ = true;
  wants_answer_ = true;
  result_.reset();
  merge_ = ReportMerge(question_.number);
  answered_.assign(position_.children.size(), false);
  for (const int child : position_.children) outgoing_.push_back({child, encode(question_)});
}

void StallInspection::receive(int from, InspectionQuestion question) {
  if (from != position_.parent) throw WireError("the sender is not the parent of this rank");
  ask(std::move(question));
}

void StallInspection::receive(int from, Report report) {
  const auto found = std::find(position_.children.begin(), position_.children.end(), from);
  if (found == position_.children.end()) throw WireError("the sender is not a child of this rank");
  const auto child = static_cast<std::size_t>(found - position_.children.begin());
  // The answer belongs to an earlier question.
  if (!running_ || report.question != question_.number || answered_[child]) return;
  check(child, report);
  answered_[child] = true;
  merge_.add(std::move(report));
  finish_if_complete();
}

// Throws WireError if the answer of a child cannot be right.
void StallInspection::check(std::size_t child, const Report& report) const {
  const std::vector<int>& below = position_.subtrees[child];
  if (report.ranks != below.size()) throw WireError("incomplete stall inspection report");
  const RankRanges subtree(below);
  const auto check_ranks = [&](const RankRanges& ranks) {
    if (!subtree.contains(ranks)) throw WireError("report of a rank outside the sender's subtree");
  };
  for (const auto& pending : report.pending) {
    check_ranks(pending.submitted);
    check_ranks(pending.waiting);
    if (question_.is_second && !std::binary_search(question_.operations.begin(),
                                                   question_.operations.end(), pending.key)) {
      throw WireError("report of an operation that nobody has asked about");
    }
  }
  check_ranks(report.quiet);
  check_ranks(report.waiting_for_unnamed);
  for (const auto& [set, ranks] : report.joined) check_ranks(ranks);
  for (const auto& [threads, ranks] : report.busy_threads) check_ranks(ranks);
}

void StallInspection::answer(const RankReport& report) {
  if (!wants_answer_) return;
  wants_answer_ = false;
  merge_.add(answer_of(report, question_));
  finish_if_complete();
}

void StallInspection::finish_if_complete() {
  if (wants_answer_ || std::find(answered_.begin(), answered_.end(), false) != answered_.end()) {
    return;
  }
  running_ = false;
  if (position_.is_root()) {
    finish_at_root(merge_.take());
  } else {
    outgoing_.push_back({position_.parent, encode(merge_.take())});
  }
}

void StallInspection::finish_at_root(Report report) {
  if (question_.is_second || report.pending.empty()) {
    result_ = std::move(report);
    return;
  }
  InspectionQuestion next{question_.number + 1, question_.quiet, true, {}};
  for (auto& pending : report.pending) next.operations.push_back(std::move(pending.key));
  ask(std::move(next));
}

std::optional<Report> StallInspection::take_result() {
  std::optional<Report> result = std::move(result_);
  result_.reset();
  return result;
}

std::vector<int> StallInspection::unanswered() const {
  std::vector<int> ranks;
  for (std::size_t child = 0; child < answered_.size(); ++child) {
    if (answered_[child]) continue;
    const auto& below = position_.subtrees[child];
    ranks.insert(ranks.end(), below.begin(), below.end());
  }
  return ranks;
}

}  // namespace horoplug
