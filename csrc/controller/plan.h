// A locked plan: batches that run again and again, in an order that all ranks know, without being
// negotiated.
//
// A rank joins a batch when all of its operations are ready here and it is done with the batch
// before; a batch commits when every rank has joined it, which its collective finds out when the
// ranks meet. Nothing that a user handed in is overwritten before that, so that a batch that was
// joined by some can be withdrawn (see Negotiator).
//
// A plan can have several choices of batches, with which its steps take turns for a while, so that
// it can be seen which is the best (see Tuner); after that the first choice is for good.
//
// An operation of the plan is known by its key (see StepMember). A key can occur several times in a
// step; what a rank submits under it takes these slots in turn.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "collectives/tuning.h"
#include "controller/dependency_query.h"

namespace horoplug {

using PlanContents = std::vector<std::vector<std::uint32_t>>;  // slots in the step, by batch

// One way to run a step.
struct PlanChoice {
  Tuning tuning;
  PlanContents batches;
  bool operator==(const PlanChoice&) const = default;
};

// Cuts a step into batches. `labels`: by slot, equal for operations that may share a batch (see
// DependencyQuery). A batch holds at most `limit` bytes, unless one operation has more.
PlanContents make_plan(std::span<const StepMember> step, std::span<const std::uint32_t> labels,
                       std::int64_t limit, bool fuse_groups);

class Plan {
 public:
  // The first batch will have the number `decided` + 1. Each of the choices has `rounds` turns.
  // Throws WireError if they are not plans of this step.
  Plan(std::uint32_t epoch, std::uint64_t decided, const std::vector<StepMember>& step,
       std::span<const PlanChoice> choices, std::uint32_t rounds);

  std::uint32_t epoch() const { return epoch_; }
  // The number of the last batch that this rank has joined.
  std::uint64_t joined() const { return joined_; }
  // Steps of which this rank has joined all.
  std::uint64_t steps_joined() const { return step_; }
  bool running() const { return running_; }
  // Of the batch that was joined last: the choice that it belongs to, and its settings.
  std::size_t last_choice() const { return last_choice_; }
  const Tuning& last_tuning() const { return choices_[last_choice_].tuning; }
  bool at_step_end() const { return !running_ && next_ == 0 && step_ > 0; }

  // This rank is ready to run an operation. False if the plan has no such operation now.
  bool ready(const std::string& name, const Signature& signature);

  // Joins the next batch, if that is possible.
  bool join_next();
  // The names in the batch that was joined last, of which the others may not know yet.
  const std::vector<std::string>& last() const { return last_; }
  void batch_done() { running_ = false; }

  // How many operations must become ready at least before anything can be joined; 0 if none has to:
  // it waits for the batch that runs.
  std::size_t missing() const { return next_batch().slots.size() - next_batch().ready; }

  // Something is ready that can not be joined since a batch before it, or its own, is not complete.
  bool held_up() const { return !running_ && ready_ > 0 && !next_batch().complete(); }

 private:
  struct Slot {
    Signature signature;
    bool ready = false;
    std::string name{};       // of what is ready
    std::uint64_t turns = 0;  // how often it was joined
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
    std::vector<std::uint32_t> slots;  // that operations of one key take, in turn
    std::size_t next = 0;
  };

  static Choice make_choice(const PlanChoice& choice, std::size_t slots);
  std::size_t choice_of(std::uint64_t step) const;
  const Batch& next_batch() const { return choices_[choice_].batches[next_]; }

  const std::uint32_t epoch_;
  const std::uint64_t trial_steps_;
  std::uint64_t joined_;
  std::uint64_t step_ = 0;
  std::size_t choice_ = 0;  // of this step
  std::size_t last_choice_ = 0;
  std::size_t next_ = 0;   // batch
  std::size_t ready_ = 0;  // operations that are ready and not joined
  bool running_ = false;
  std::vector<std::string> last_;
  std::vector<Slot> slots_;
  std::vector<Choice> choices_;
  std::unordered_map<std::string, Turn> turns_;
};

}  // namespace horoplug
