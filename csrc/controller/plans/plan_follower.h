// One rank's part in the plans of a process set: it remembers them, follows the installed one, and
// stops it together with the other ranks.
//
// The root decides about plans (Coordinator); every rank, the root included, applies its decisions
// here. A rank that cannot follow the plan asks for its end. The root halts the plan on all ranks,
// to end or to pause it, and they report along the tree how far they have come (PlanHalt). This
// class sends and receives these messages, kBreak, kHalt and kHalted.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "controller/messages/messages.h"
#include "controller/plans/dependency_query.h"
#include "controller/plans/plan.h"
#include "controller/plans/plan_halt.h"
#include "controller/state/pending_operations.h"
#include "controller/state/tree_node.h"

namespace horoplug {

class PlanFollower {
 public:
  // `pending`: the operations of this rank, without those that a plan has run. `pending` and `node`
  // must outlive this object. Only a root with children installs plans, so that a halt takes at
  // least one message.
  PlanFollower(std::uint32_t set, TreeNode& node, PendingOperations& pending);

  // ---- the installed plan

  bool installed() const { return plan_ != nullptr; }
  // Between a pause and the plan's resumption, or the installation of another plan.
  bool paused() const { return paused_; }
  // Requires installed().
  const Plan& plan() const { return *plan_; }
  const PlanHalt& halt_state() const { return halt_; }
  // The plan runs, and this rank knows of no reason why it will not go on.
  bool follows() const { return plan_ != nullptr && !paused_ && !halt_.asked(); }
  // An operation is ready here, but the plan delays it because its batch or an earlier one is
  // incomplete on this rank.
  bool held_up() const { return plan_ && !halt_.asked() && plan_->held_up(); }
  // This rank has joined a batch of the plan, and other ranks may not have.
  bool waits_in_plan() const { return plan_ && !halt_.asked() && plan_->running(); }
  // Fewer submissions than this cannot change anything.
  std::size_t submissions_wanted() const;

  // This rank is ready to run an operation. Returns false if the plan does not contain it, so that
  // it is negotiated. Breaks the plan if it cannot run the operation now. Requires installed().
  bool submit(const IdentityPtr& operation);
  // Joins the plan's next batch, if there is a plan and it can. Returns whether it did.
  bool join_next() { return plan_ && !halt_.halted() && plan_->join_next(); }
  // A batch is done on this rank. `epoch`: of the plan when the batch was joined. Returns whether
  // this ends a step of the installed plan.
  bool batch_done(std::uint32_t epoch);

  // ---- its end and its pauses

  // Ends the plan, if there is one, on all ranks.
  void break_plan();
  // Root only: halts the plan on all ranks.
  void halt();
  // kBreak, kHalt, kHalted. Throws WireError if the message is invalid. Returns true on the root if
  // it completes the halt, so that the root must decide whether the plan ends or is paused.
  bool receive(int from, MessageKind kind, const PlanNotice& notice);

  // ---- the root's decisions; they throw WireError if they are invalid

  // Whether a decision of this kind can be applied now.
  bool allows(DecisionItem::Kind kind) const;
  // Remembers the step of a query in a place.
  void remember(std::size_t place, const DependencyQuery& query, std::uint64_t number);
  // Installs a remembered plan instead of the current one, if any. `last_batch`: the last batch
  // that was decided.
  void install(const DecisionItem& item, std::uint64_t last_batch);
  // The plan stops after batch `last`, the minimum that all ranks have joined. If this rank has
  // joined one more, that batch is withdrawn.
  void pause(std::uint64_t last);
  void uninstall(std::uint64_t last);
  void resume(std::uint64_t last_batch);

 private:
  bool answer_halt();
  void check_stop(std::uint64_t last) const;
  void leave();

  const std::uint32_t set_;
  TreeNode& node_;
  PendingOperations& pending_;
  std::array<std::optional<Plan>, kRememberedPlans> plans_;  // by place
  Plan* plan_ = nullptr;                                     // the installed one
  // Of the installed plan. It grows with every installation and resumption.
  std::uint32_t epoch_ = 0;
  bool paused_ = false;
  PlanHalt halt_;  // of plan_
};

}  // namespace horoplug
