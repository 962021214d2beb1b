// The root's part of negotiation: what is decided next, from what is ready on all ranks.
//
// The coordinator fuses operations that are ready into batches (DecisionQueue). It decides which
// plan is installed and with which choices (PlanLearner, RememberedPlans, Tuner), and whether an
// installed plan is paused or ends. It returns decisions; the Negotiator sends them to all ranks
// and applies them on this one, as every rank does.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "controller/messages/messages.h"
#include "controller/plans/decision_queue.h"
#include "controller/plans/plan_follower.h"
#include "controller/plans/plan_learner.h"
#include "controller/plans/remembered_plans.h"
#include "controller/plans/tuner.h"
#include "controller/state/rank_state.h"
#include "controller/state/readiness.h"

namespace horoplug {

class Coordinator {
 public:
  struct Options {
    std::int64_t fusion_threshold = 128 << 20;
    bool fuse_groups = true;
    std::size_t cache_capacity = 8192;
    // Limit for batches that are decided but not yet done on the root. Two keep the ranks busy;
    // more would only take tensors away from later, larger batches.
    int max_outstanding = 2;
    // The initial settings, which also apply to all negotiated batches. The batches of a plan are
    // small enough that the first one is complete long before the last.
    Tuning tuning;
    TunerOptions tuner;
    Tuner::Placement placement;
  };

  // `state`, `plans` and `learner`: of the root's own rank, after all earlier decisions. They must
  // outlive the coordinator.
  Coordinator(const Options& options, const RankState& state, const PlanFollower& plans,
              PlanLearner& learner);

  // ---- what there is to decide

  // All ranks have submitted an operation, or have joined.
  void add(ReadinessTable::Complete complete);
  // The set closes. `rank`: the rank that leaves, or kSetRemoved.
  void add_end(int rank) { queue_.add_end(rank); }
  // Forgets the operations that are ready.
  void clear() { queue_.clear(); }

  // A negotiated batch is done on this rank.
  void batch_done() { queue_.batch_done(); }
  // A step of the installed plan has ended on this rank. Returns whether the plan should end,
  // because it has served its trial. `now`: in seconds on any clock.
  bool plan_step_done(double now);

  // ---- decisions, in order; they must be applied before the next call

  // Without a plan: everything that can be decided now.
  std::vector<DecisionItem> decide();

  // With a plan: errors, which wait for nothing.
  std::vector<DecisionItem> take_errors() { return queue_.take_errors(); }
  // Operations that the plan does not contain can run. Then the plan should be halted. It should
  // end, too, if the program has stopped running it.
  bool has_batch_beside_plan() const { return queue_.has_batch(false); }
  bool plan_is_abandoned() const;
  // With a plan that is halted on all ranks: it ends.
  std::vector<DecisionItem> end_plan();
  // With a plan that is halted on all ranks: it is paused for the operations that it does not
  // contain and that are ready on all ranks. They run, and the plan is resumed, or another plan
  // takes its place.
  std::vector<DecisionItem> pause_plan();

  // ---- decisions that this rank has applied

  // A plan was installed, or resumed, after this batch.
  void plan_installed(std::uint64_t last_batch);
  void plan_resumed(std::uint64_t last_batch) { resumed_after_ = last_batch; }
  // The plan has ended after this batch.
  void plan_uninstalled(std::uint64_t last_batch) { queue_.continue_after(last_batch); }

  std::vector<Trial> take_trials() { return tuner_.take_results(); }

 private:
  void decide_batch(std::vector<DecisionItem>& items);
  bool consider_plan(std::vector<DecisionItem>& items);
  bool consider_continuation(std::vector<DecisionItem>& items);
  bool would_break(std::span<const StepMember> step) const;
  DecisionItem installation(std::size_t place, std::size_t skipped);
  void note_end_of_plan(bool broken);
  std::vector<std::uint32_t> slots_joined() const;

  const std::int64_t fusion_threshold_;
  const bool fuse_groups_;
  const RankState& state_;
  const PlanFollower& plans_;
  PlanLearner& learner_;
  DecisionQueue queue_;
  RememberedPlans remembered_;
  Tuner tuner_;
  std::uint64_t resumed_after_ = 0;  // the last batch before the plan's last resumption
  int idle_pauses_ = 0;              // since the plan last ran a batch
};

}  // namespace horoplug
