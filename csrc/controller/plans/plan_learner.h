// Finds out that a program repeats its steps, and which operations of a step may share a batch:
// what a plan needs before it can be installed.
//
// Every rank keeps the last decided operations. The root watches their order for steps that repeat
// (StepPattern). After enough of them it proposes a dependency query (DependencyQuery), which every
// rank answers along the tree. Then the step is known well enough for a plan. A plan that keeps
// ending soon doubles the number of steps that the next one needs.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "controller/plans/dependency_query.h"
#include "controller/plans/step_digest.h"
#include "controller/plans/step_pattern.h"
#include "controller/state/fusion.h"

namespace horoplug {

class PlanLearner {
 public:
  // The dependency stage of an operation that not every rank has submitted.
  static constexpr std::uint64_t kNoDependencyStage = ~std::uint64_t{0};

  // `plan_after`: identical consecutive steps before a plan; 0: never. `children`: of this rank in
  // the tree.
  PlanLearner(int plan_after, std::size_t children)
      : plan_after_(plan_after),
        children_(children),
        recent_(2 * StepPattern::kMostOperations),
        steps_wanted_(plan_after) {}

  // ---- every rank, in the order of the decisions

  void note(const Identity& operation, std::uint64_t dependency_stage);
  // The root has decided a query about the last `operations`. Throws WireError if fewer have run.
  void begin_query(std::uint64_t number, std::uint32_t operations);
  // A child's answer. Returns whether it belongs to the current query; others are out of date.
  // Throws WireError if it is impossible.
  bool add_answer(std::uint64_t query, const std::vector<std::uint32_t>& labels);
  // Complete when every child has answered; then its labels are those of the subtree.
  const DependencyQuery& query() const { return query_; }
  // Forgets the operations and the query.
  void reset();

  // ---- root only

  // A batch was decided.
  void note_batch(const std::vector<ReadyOperation>& batch);
  // An installed plan has run batches since the last note_batch(). The steps of a plan follow each
  // other: two of them must have been decided without an interruption before it is proposed.
  void interrupt() { recent_.clear(); }
  // The decided operations since the last interruption.
  const RecentOperations& recent() const { return recent_; }
  // The query that should follow the batch that was noted last.
  struct Query {
    std::uint64_t number = 0;
    std::uint32_t operations = 0;
  };
  std::optional<Query> propose_query();
  // The number of query(), once after all ranks have answered.
  std::optional<std::uint64_t> take_learned();
  // A plan is forgotten after `steps` steps in all. `settled`: it ended because its trial was over.
  void plan_ended(std::uint64_t steps, bool settled);

 private:
  const int plan_after_;
  const std::size_t children_;
  std::deque<StepMember> history_;  // the last decided operations, identical on all ranks
  DependencyQuery query_;
  std::uint64_t last_query_ = 0;

  // Root only.
  StepPattern pattern_;
  RecentOperations recent_;
  StepDigest queried_step_;  // as in pattern_
  std::uint64_t queries_ = 0;
  std::uint64_t learned_ = 0;  // the last result of take_learned()
  int steps_wanted_;
};

}  // namespace horoplug
