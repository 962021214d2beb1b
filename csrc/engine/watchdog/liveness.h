// Who answers, while something stands still: whoever waits for a rank that waits itself would blame
// the wrong one.
#pragma once

#include <algorithm>
#include <vector>

namespace horoplug {

class LivenessCheck {
 public:
  bool running() const { return !heard_.empty(); }
  // Among `size` ranks, of which this one is one.
  void begin(int size, int rank) {
    heard_.assign(static_cast<std::size_t>(size), false);
    hear(rank);
  }
  void end() { heard_.clear(); }
  // Answers to a call that is over are of no interest.
  void hear(int rank) {
    if (running()) heard_[static_cast<std::size_t>(rank)] = true;
  }
  // Those of `ranks` that have not answered.
  std::vector<int> silent(std::vector<int> ranks) const {
    if (!running()) return {};
    std::erase_if(ranks, [this](int rank) { return heard_[static_cast<std::size_t>(rank)]; });
    return ranks;
  }

 private:
  std::vector<bool> heard_;  // by rank
};

}  // namespace horoplug
