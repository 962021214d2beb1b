// Sees when a program repeats itself.
//
// One operation, the anchor, marks where steps begin. Steps repeat when one has the same operations
// as the one before, each as often, in whatever order. An anchor that occurs several times in a
// step, or not in every one, makes steps that are not alike: then another operation is tried.
#pragma once

#include <cstdint>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace horoplug {

class StepPattern {
 public:
  // What goes on for longer without an anchor is no step.
  static constexpr std::size_t kMostOperations = 1 << 14;

  // The next operation that was decided; equal operations have equal numbers.
  void note(std::uint64_t operation);
  // Something that no plan can hold.
  void disturb() { *this = StepPattern(); }

  // Complete steps so far that were like the one before them, without a break.
  int repeated() const { return repeated_; }
  // The current step has all operations of the last one and nothing else, and is not yet followed
  // by another operation.
  bool at_boundary() const { return misses_ == 0 && last_size_ > 0 && step_.size() == last_size_; }
  // The operations of the current step, in order.
  const std::vector<std::uint64_t>& step() const { return step_; }

 private:
  void begin_step();

  std::optional<std::uint64_t> anchor_;
  std::unordered_set<std::uint64_t> unfit_;  // anchors that made unlike steps
  std::vector<std::uint64_t> step_;
  std::unordered_map<std::uint64_t, int> counts_;  // in the current step
  std::unordered_map<std::uint64_t, int> last_counts_;
  std::size_t last_size_ = 0;
  int misses_ =
      0;  // operations of the current step that the last one did not have, or not as often
  int repeated_ = 0;
};

}  // namespace horoplug
