// Sees when a program repeats itself: a step is a run of operations in which each occurs once, and
// steps repeat when one has the same operations as the one before, in whatever order.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_set>
#include <vector>

namespace horoplug {

class StepWatch {
 public:
  // The next operation that was decided, by its number.
  void note(std::uint32_t id);
  // Something that no plan can hold.
  void disturb() { *this = StepWatch(); }

  // Complete steps so far that were like the one before them, without a break.
  int repeated() const { return repeated_; }
  // The current step has all operations of the last one and nothing else, and is not yet followed
  // by another operation.
  bool at_boundary() const {
    return misses_ == 0 && !last_.empty() && order_.size() == last_.size();
  }
  // The operations of the current step, in order.
  std::span<const std::uint32_t> order() const { return order_; }

 private:
  std::vector<std::uint32_t> order_;
  std::unordered_set<std::uint32_t> current_;
  std::unordered_set<std::uint32_t> last_;
  int misses_ = 0;  // operations of the current step that the last one did not have
  int repeated_ = 0;
};

}  // namespace horoplug
