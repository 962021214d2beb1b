// What the root knows about the plans that the ranks remember, and when one of them fits again.
//
// A plan that ends keeps its place: the root can install it again by the number of the place. A
// place is used again for another plan, the least recently used one first. Only the root decides
// about places, so that all ranks remember the same plans.
//
// A plan is installed again
// - after its step was negotiated (find_step), or
// - at once, when an operation is ready that the installed plan lacks (find_continuation). That is
//   a guess. A plan that was guessed wrongly is not guessed again before it has run several times.
//   Without guesses, a training step takes 1.2 times as long on average if seven other tensors are
//   reduced for five of fifteen steps, and 1.6 times if every ten steps differ by one tensor from
//   the ten before (benchmarks/loops.py, two ranks of one host).
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "controller/plans/plan.h"
#include "controller/plans/step_digest.h"
#include "controller/state/fusion.h"
#include "controller/state/pending_operations.h"

namespace horoplug {

class RememberedPlans {
 public:
  struct Known {
    std::vector<StepMember> step;
    std::vector<std::uint32_t> labels;  // by slot, see DependencyQuery
    // With which it was last installed; none: it was not.
    std::vector<PlanChoice> choices{};
    std::uint32_t rounds = 0;
  };

  // Remembers the plan for a step. Returns its place.
  std::size_t add(const std::vector<StepMember>& step, const std::vector<std::uint32_t>& labels);
  Known& at(std::size_t place) { return places_[place]->known; }

  // The plan whose step the sequence of decided operations ends with.
  std::optional<std::size_t> find_step(const RecentOperations& recent) const;

  struct Continuation {
    std::size_t place = 0;
    std::size_t skipped = 0;  // batches of its step that have already run
  };
  // The plan that fits an operation that is ready and that the installed plan lacks. `joined`: the
  // slots of the installed plan that have run in its current step. `pending`: of this rank.
  std::optional<Continuation> find_continuation(const ReadyOperation& ready,
                                                std::span<const std::uint32_t> joined,
                                                const PendingOperations& pending) const;

  // A plan is installed, for the first time or again.
  void begun(std::size_t place, bool guessed);
  struct End {
    std::uint64_t steps;  // of the plan, each time that it was installed
    bool forgotten;
  };
  // The installed plan is replaced or uninstalled after `steps` steps since begun(). `broken`: a
  // rank could not follow it. A plan that was broken soon several times in a row is forgotten.
  End ended(std::uint64_t steps, bool broken);

 private:
  struct Place {
    Known known;
    std::vector<std::uint64_t> operations{};  // by slot
    StepDigest digest{};
    std::unordered_map<std::string, std::size_t> slots{};  // the first one of each key
    std::uint64_t steps = 0;
    std::uint64_t used = 0;  // larger: more recently
    // Runs of this plan until it may be guessed again, and the number of them after the next wrong
    // guess.
    int distrust = 0;
    int penalty = 1;
    int early_breaks = 0;  // in a row
  };

  std::optional<std::size_t> batches_with(const Place& place, const StepDigest& joined) const;

  std::array<std::optional<Place>, kRememberedPlans> places_;
  std::optional<std::size_t> installed_;
  bool guessed_ = false;
  std::uint64_t uses_ = 0;
};

}  // namespace horoplug
