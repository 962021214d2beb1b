// How the ranks end or pause a plan together: which of its batches is the last that runs.
//
// Any rank may ask for the end, and asks once. The root halts all ranks, for that or for a pause. A
// halted rank joins no further batch and reports, along the tree, the last one that it has joined.
// The minimum over all ranks is the last batch that all of them have joined. This class is the
// state of one rank; the PlanFollower sends the messages.
#pragma once

#include <algorithm>
#include <cstdint>
#include <set>
#include <utility>
#include <vector>

#include "base/wire.h"

namespace horoplug {

class PlanHalt {
 public:
  // `children`: of this rank in the tree.
  explicit PlanHalt(const std::vector<int>& children)
      : children_(children.begin(), children.end()) {}

  // This rank wants the plan to end, or has learned that it ends. Returns false if it knew.
  bool ask() {
    end_wanted_ = true;
    return !std::exchange(asked_, true);
  }
  // The plan ends, or is halted.
  bool asked() const { return asked_; }
  // This rank wants the plan to end or, on the root, any rank does.
  bool end_wanted() const { return end_wanted_; }

  // This rank joins no batch after `joined`.
  void begin(std::uint64_t joined) {
    asked_ = halted_ = true;
    missing_ = children_;
    last_batch_ = joined;
  }
  bool halted() const { return halted_; }
  // The last batch that a child's whole subtree has joined. Throws WireError if the child owes no
  // report.
  void report(int child, std::uint64_t batch) {
    if (!halted_ || missing_.erase(child) == 0) throw WireError("halt report without a halt");
    last_batch_ = std::min(last_batch_, batch);
  }
  // Whether all children have reported. last_batch() is then the minimum over the subtree.
  bool complete() const { return halted_ && missing_.empty(); }
  std::uint64_t last_batch() const { return last_batch_; }

  // Another plan begins, or the plan has ended or is resumed.
  void reset() { asked_ = end_wanted_ = halted_ = false; }

 private:
  const std::set<int> children_;
  std::set<int> missing_;  // children that have not reported
  std::uint64_t last_batch_ = 0;
  bool asked_ = false;
  bool end_wanted_ = false;
  bool halted_ = false;
};

}  // namespace horoplug
