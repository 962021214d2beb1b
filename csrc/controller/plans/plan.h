// An installed plan: batches that recur in an order known to all ranks, without negotiation.
//
// A rank joins a batch when all of its operations are ready on this rank and the batch before it is
// done. A batch commits when every rank has joined it, which its collective detects when the ranks
// synchronise. Until then no user memory is overwritten, so that a batch that only some ranks have
// joined can be withdrawn (see PlanFollower).
//
// A plan can have several choices of batches, which its steps use in turn for a while, so that the
// tuner can compare them (see Tuner). After that the first choice stays.
//
// An operation of the plan is identified by its key (see StepMember). A key may occur several times
// in a step: submissions under that key take its slots in turn.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "controller/plans/dependency_query.h"
#include "controller/state/plan_choice.h"

namespace horoplug {

// Divides a step into batches. `labels`, by slot: equal for operations that may share a batch (see
// DependencyQuery). A batch holds at most `limit` bytes, unless a single operation is larger.
PlanContents make_plan(std::span<const StepMember> step, std::span<const std::uint32_t> labels,
                       std::int64_t limit, bool fuse_groups);

class Plan {
 public:
  explicit Plan(const std::vector<StepMember>& step);

  // Each choice has `rounds` turns. Throws WireError if the choices do not fit the step.
  void set_choices(std::span<const PlanChoice> choices, std::uint32_t rounds);
  // The plan is installed, for the first time or again. Its first batch has the number `decided` +
  // 1. The first `skipped` batches of its first step have run outside of the plan. Throws WireError
  // if it cannot begin there, or has no choices.
  void begin(std::uint32_t epoch, std::uint64_t decided, std::size_t skipped = 0);

  std::uint32_t epoch() const { return epoch_; }
  // Whether the step has an operation under this key, so that the plan alone runs it.
  bool contains(std::string_view key) const { return turns_.contains(key); }
  // The number of the last batch that this rank has joined.
  std::uint64_t joined() const { return joined_; }
  // The number of steps whose batches this rank has all joined.
  std::uint64_t steps_joined() const { return step_; }
  bool running() const { return running_; }
  // The plan's epoch when the last batch was joined.
  std::uint32_t running_epoch() const { return running_epoch_; }
  // The choice that the last joined batch belongs to, and its settings.
  std::size_t last_choice() const { return last_choice_; }
  const Tuning& last_tuning() const { return choices_[last_choice_].tuning; }
  bool at_step_end() const { return !running_ && next_ == 0 && step_ > 0; }

  // This rank is ready to run an operation.
  enum class Place {
    kNone,   // the step has no operation under this key, so that the plan leaves it to others
    kTaken,  // the plan alone runs it, and cannot now
    kFound,
  };
  Place ready(const IdentityPtr& operation);

  // Joins the next batch if it is complete. Returns whether it did.
  bool join_next();
  // The last joined batch, which other ranks may not have joined yet.
  const std::vector<IdentityPtr>& last() const { return last_; }
  void batch_done() { running_ = false; }

  // Undoes the last join_next(): the batch runs later. Returns false if an operation of the next
  // step is in the place of one of its operations; the plan can then only end.
  bool withdraw();
  // The plan goes on in a new epoch, after other batches. Its next batch has the number `decided`
  // + 1.
  void resume(std::uint32_t epoch, std::uint64_t decided) {
    epoch_ = epoch;
    joined_ = decided;
  }

  // The slots of the current step that have been joined by batch `decided`, the last one that this
  // rank has joined or the one before.
  std::vector<std::uint32_t> slots_joined(std::uint64_t decided) const;

  // The minimum number of further operations that must become ready before the next batch can be
  // joined. 0: only the running batch delays it.
  std::size_t missing() const { return next_batch().slots.size() - next_batch().ready; }

  // An operation is ready, but its batch or an earlier one is incomplete.
  bool held_up() const { return !running_ && ready_ > 0 && !next_batch().complete(); }

 private:
  struct Slot {
    Signature signature;
    bool ready = false;
    IdentityPtr operation{};  // that was ready last
    std::uint64_t turns = 0;  // number of times it was joined
  };
  struct Batch {
    std::vector<std::uint32_t> slots;
    std::size_t ready = 0;
    bool complete() const { return ready == slots.size(); }
  };
  struct Choice {
    Tuning tuning;
    std::vector<Batch> batches;
    std::vector<std::size_t> batch_of;  // by slot
  };
  struct Turn {
    std::vector<std::uint32_t> slots;  // the slots of one key, in turn
    std::size_t next = 0;
  };

  static Choice make_choice(const PlanChoice& choice, std::size_t slots);
  std::size_t choice_of(std::uint64_t step) const;
  const Batch& next_batch() const { return choices_[choice_].batches[next_]; }

  std::uint32_t epoch_ = 0;
  std::uint64_t trial_steps_ = 0;
  std::uint64_t joined_ = 0;
  std::uint64_t step_ = 0;
  std::size_t choice_ = 0;  // of the current step
  std::size_t last_choice_ = 0;
  std::size_t next_ = 0;   // index of the next batch
  std::size_t ready_ = 0;  // operations that are ready and not joined
  bool running_ = false;
  bool intact_ = true;  // otherwise this rank joins no batch any more
  std::uint32_t running_epoch_ = 0;
  std::vector<IdentityPtr> last_;
  std::vector<Slot> slots_;
  std::vector<Choice> choices_;
  // By key.
  struct HashOfKey {
    using is_transparent = void;
    std::size_t operator()(std::string_view key) const {
      return std::hash<std::string_view>{}(key);
    }
    std::size_t operator()(const Identity& operation) const { return operation.key_hash; }
  };
  struct SameKey {
    using is_transparent = void;
    bool operator()(std::string_view a, std::string_view b) const { return a == b; }
    bool operator()(const Identity& a, std::string_view b) const { return a.key == b; }
    bool operator()(std::string_view a, const Identity& b) const { return a == b.key; }
  };
  std::unordered_map<std::string, Turn, HashOfKey, SameKey> turns_;
};

}  // namespace horoplug
