// Detects that a program repeats the same step.
//
// One operation, the anchor, marks the beginning of each step. Steps repeat when a step has the
// same operations as the one before it, each the same number of times, in any order. An anchor that
// occurs several times in a step, or not in every step, yields unequal steps; then another
// operation becomes the anchor: the next one that recurs, or one that recurs at a greater distance.
// The latter finds steps that consist of several similar parts. Only the first operation
// of a batch becomes the anchor: a plan begins between two batches, so that the boundary of a step
// must be there, too.
//
// All costs are constant per operation.
#pragma once

#include <cstdint>
#include <optional>
#include <unordered_map>

#include "controller/plans/step_digest.h"

namespace horoplug {

class StepPattern {
 public:
  // A longer sequence without the anchor is not a step.
  static constexpr std::size_t kMostOperations = 1 << 14;

  // Adds the next decided operation. Equal operations have equal numbers. `begins_batch`: it is the
  // first one of its batch.
  void note(std::uint64_t operation, bool begins_batch);
  // Resets the pattern after an operation that no plan can contain.
  void disturb() { *this = StepPattern(); }

  // The number of complete steps, up to now, that were equal to their predecessor.
  int repeated() const { return repeated_; }
  // The current step has exactly the operations of the last one, and no operation follows yet.
  bool at_boundary() const { return last_.operations() > 0 && step_ == last_; }
  // The operations of the current step.
  const StepDigest& step() const { return step_; }

 private:
  std::uint64_t distance_to_last(std::uint64_t operation) const;
  void choose_anchor(std::uint64_t operation);
  void begin_step();
  void give_up_anchor();

  std::optional<std::uint64_t> anchor_;
  // Anchors that yielded unequal steps: how often, and before which position they are not tried
  // again.
  struct Unfit {
    int times = 0;
    std::uint64_t until = 0;
  };
  std::unordered_map<std::uint64_t, Unfit> unfit_;
  std::unordered_map<std::uint64_t, std::uint64_t> seen_;  // the last position of an operation
  std::uint64_t position_ = 0;
  std::uint64_t step_begin_ = 0;
  std::uint64_t batch_begin_ = 0;
  // A step with more operations is not expected; the anchor does not recur.
  std::uint64_t longest_ = 0;
  // The greatest distance at which an anchor has recurred since steps were equal; 0: none was
  // unfit.
  std::uint64_t unfit_distance_ = 0;
  std::uint64_t first_ = 0;  // the first operation of the current step
  StepDigest step_, last_;
  int repeated_ = 0;
};

}  // namespace horoplug
