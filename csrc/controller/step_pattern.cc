#include "controller/step_pattern.h"

#include <utility>

namespace horoplug {
namespace {

// An operation that was unfit long ago may fit meanwhile.
constexpr std::size_t kMostUnfit = 64;

}  // namespace

void StepPattern::begin_step() {
  if (at_boundary()) {
    ++repeated_;
  } else {
    repeated_ = 0;
    if (last_size_ > 0) {
      // The next operation to recur becomes the anchor.
      unfit_.insert(*std::exchange(anchor_, std::nullopt));
      if (unfit_.size() > kMostUnfit) unfit_.clear();
    }
  }
  // Operations before the first occurrence of the anchor do not form a whole step.
  const bool is_whole = anchor_ && step_.front() == *anchor_;
  last_size_ = is_whole ? step_.size() : 0;
  last_counts_ = is_whole ? std::exchange(counts_, {}) : decltype(counts_){};
  counts_.clear();
  step_.clear();
  misses_ = 0;
}

void StepPattern::note(std::uint64_t operation) {
  if (!anchor_ && counts_.contains(operation) && !unfit_.contains(operation)) {
    anchor_ = operation;
    last_size_ = 0;
  }
  if (anchor_ == operation && !step_.empty()) begin_step();
  if (step_.size() >= kMostOperations) disturb();
  step_.push_back(operation);
  const int count = ++counts_[operation];
  const auto before = last_counts_.find(operation);
  if (before == last_counts_.end() || before->second < count) ++misses_;
}

}  // namespace horoplug
