// Detects that a program repeats the same step.
//
// One operation, the anchor, marks the beginning of each step. Steps repeat when a step has the
// same operations as the one before it, each the same number of times, in any order. An anchor that
// occurs several times in a step, or not in every step, yields unequal steps; then another
// operation becomes the anchor.
#pragma once

#include <cstdint>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace horoplug {

class StepPattern {
 public:
  // A longer sequence without the anchor is not a step.
  static constexpr std::size_t kMostOperations = 1 << 14;

  // Adds the next decided operation. Equal operations have equal numbers.
  void note(std::uint64_t operation);
  // Resets the pattern after an operation that no plan can contain.
  void disturb() { *this = StepPattern(); }

  // The number of complete steps, up to now, that were equal to their predecessor.
  int repeated() const { return repeated_; }
  // The current step has exactly the operations of the last one, and no operation follows yet.
  bool at_boundary() const { return misses_ == 0 && last_size_ > 0 && step_.size() == last_size_; }
  // The operations of the current step, in order.
  const std::vector<std::uint64_t>& step() const { return step_; }

 private:
  void begin_step();

  std::optional<std::uint64_t> anchor_;
  std::unordered_set<std::uint64_t> unfit_;  // anchors that yielded unequal steps
  std::vector<std::uint64_t> step_;
  std::unordered_map<std::uint64_t, int> counts_;  // of the current step
  std::unordered_map<std::uint64_t, int> last_counts_;
  std::size_t last_size_ = 0;
  int misses_ = 0;  // operations of the current step that exceed those of the last one
  int repeated_ = 0;
};

}  // namespace horoplug
