#include "controller/plans/step_pattern.h"

#include <algorithm>
#include <utility>

namespace horoplug {
namespace {

constexpr std::size_t kMostUnfit = 64;
// An anchor is not given up before this many operations, even if it recurred after a few. After as
// many it is tried again for the first time; that number doubles each time.
constexpr std::uint64_t kShortStep = 64;
constexpr int kMostDoublings = 8;

}  // namespace

// 0: the operation has not occurred.
std::uint64_t StepPattern::distance_to_last(std::uint64_t operation) const {
  const auto found = seen_.find(operation);
  return found != seen_.end() ? position_ - found->second : 0;
}

void StepPattern::choose_anchor(std::uint64_t operation) {
  const std::uint64_t distance = distance_to_last(operation);
  // A batch that follows itself may have become a loop of its own.
  const bool follows_itself = distance == position_ - batch_begin_;
  const auto unfit = unfit_.find(operation);
  if (unfit != unfit_.end() && !(follows_itself && position_ >= unfit->second.until)) return;
  const bool recurs_in_step = distance > 0 && distance <= position_ - step_begin_;
  const bool is_rarer = unfit_distance_ > 0 && repeated_ == 0 && distance > unfit_distance_;
  if (is_rarer) {
    unfit_distance_ = distance;
  } else if (anchor_ || !recurs_in_step) {
    return;
  }
  anchor_ = operation;
  last_ = {};
  longest_ = std::max(2 * distance, kShortStep);
}

void StepPattern::give_up_anchor() {
  if (unfit_.size() >= kMostUnfit) unfit_.clear();
  Unfit& unfit = unfit_[*std::exchange(anchor_, std::nullopt)];
  unfit.until = position_ + (kShortStep << std::min(unfit.times++, kMostDoublings));
  repeated_ = 0;
  last_ = {};
}

void StepPattern::begin_step() {
  // Operations before the first occurrence of the anchor do not form a whole step, nor do those
  // that contain an anchor which was not one yet.
  const bool is_whole = first_ == anchor_ && distance_to_last(first_) == position_ - step_begin_;
  if (at_boundary()) {
    ++repeated_;
    unfit_distance_ = 0;
  } else {
    repeated_ = 0;
    if (last_.operations() > 0) {
      // The next operation to recur becomes the anchor.
      unfit_distance_ = std::max<std::uint64_t>(unfit_distance_, step_.operations());
      give_up_anchor();
    }
  }
  last_ = is_whole && anchor_ ? step_ : StepDigest();
  step_ = {};
  step_begin_ = position_;
}

void StepPattern::note(std::uint64_t operation, bool begins_batch) {
  if (step_.operations() >= kMostOperations) disturb();
  if (anchor_ && step_.operations() > longest_) {
    // The program has turned to something else.
    give_up_anchor();
    step_ = {};
    step_begin_ = position_;
  }
  if (begins_batch) {
    choose_anchor(operation);
    batch_begin_ = position_;
  }
  if (anchor_ == operation && step_.operations() > 0) begin_step();
  if (step_.operations() == 0) first_ = operation;
  step_.add(operation);
  if (seen_.size() >= 2 * kMostOperations) seen_.clear();
  seen_[operation] = position_++;
}

}  // namespace horoplug
