// Applies the root's decisions about operations to the state of one rank, and keeps what the engine
// is to do about them, in order, until it is taken.
//
// Batches are numbered without gaps, whether they were negotiated or belong to a plan.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "base/inline_vector.h"
#include "base/status.h"
#include "controller/messages/messages.h"
#include "controller/plans/plan.h"
#include "controller/plans/plan_learner.h"
#include "controller/state/rank_state.h"

namespace horoplug {

class AppliedDecisions {
 public:
  struct Decision {
    DecisionItem::Kind kind;
    // kBatch, kJoined; kUninstallPlan, kPausePlan: the last batch that is not withdrawn
    std::uint64_t batch = 0;
    // kBatch, kUninstallPlan, kPausePlan: the plan's epoch; 0 if the batch was negotiated
    std::uint32_t plan = 0;
    // kBatch: operations in order; kJoined: the join; kError: the operation that fails, if this
    // rank has submitted it
    InlineVector<IdentityPtr> operations;
    // kBatch, indexed like `operations`: ranks that have joined and contribute no data. Such a rank
    // has not submitted the operation. Empty if there are none.
    std::vector<RankRanges> absent;
    bool lacks(std::size_t index, int submitter) const {
      return index < absent.size() && absent[index].contains(submitter);
    }
    Tuning tuning;  // kBatch: its settings
    int rank = 0;  // kJoined: the last rank to join; kClose: the rank that has left, or kSetRemoved
    Status status;  // kError, kFailAll, kClose
  };

  // `rank`: this rank's number. `tuning`: of negotiated batches. `state` and `learner` must outlive
  // this object.
  AppliedDecisions(int rank, const Tuning& tuning, RankState& state, PlanLearner& learner)
      : rank_(rank), tuning_(tuning), state_(state), learner_(learner) {}

  // The last batch that was decided. Batches of a plan count when it stops.
  std::uint64_t last_batch() const { return last_batch_; }

  // These throw WireError if the decision does not fit the state.
  void apply_batch(const DecisionItem& item);
  void apply_join(const DecisionItem& item);   // kJoined
  void apply_error(const DecisionItem& item);  // kError
  // All pending operations have ended with this status, or the set has, because `rank` has left.
  // The caller has applied it.
  void add_end(DecisionItem::Kind kind, const Status& status, int rank = 0);

  // This rank has joined a batch of the plan.
  void add_plan_batch(const Plan& plan);
  // The plan of this epoch has ended or is paused after batch `last`.
  void add_plan_stop(DecisionItem::Kind kind, std::uint32_t epoch, std::uint64_t last);

  // Those since the last call, in place of what is in `taken`.
  void take(std::vector<Decision>& taken) {
    fails_all_ = false;
    taken.clear();
    taken.swap(decisions_);
  }
  std::vector<Decision> take() {
    std::vector<Decision> taken;
    take(taken);
    return taken;
  }
  // Whether take() will return a kFailAll.
  bool fails_all() const { return fails_all_; }

 private:
  void advance(std::uint64_t number);
  void apply_member(const DecisionItem::Member& member, Decision& decision);

  const int rank_;
  const Tuning tuning_;
  RankState& state_;
  PlanLearner& learner_;
  std::uint64_t last_batch_ = 0;
  std::vector<Decision> decisions_;
  bool fails_all_ = false;
};

}  // namespace horoplug
