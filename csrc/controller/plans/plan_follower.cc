#include "controller/plans/plan_follower.h"

#include <limits>
#include <utility>

namespace horoplug {

PlanFollower::PlanFollower(std::uint32_t set, TreeNode& node, PendingOperations& pending)
    : set_(set), node_(node), pending_(pending), halt_(node.position().children) {}

// ---- the installed plan ----

std::size_t PlanFollower::submissions_wanted() const {
  if (!plan_ || halt_.asked()) return 1;
  const std::size_t missing = plan_->missing();
  return missing > 0 ? missing : std::numeric_limits<std::size_t>::max();
}

// Every rank comes to the same conclusion about which operations belong to the plan, because that
// depends on the key alone.
bool PlanFollower::submit(const IdentityPtr& operation) {
  const Plan::Place place = plan_->ready(operation);
  if (place == Plan::Place::kTaken) break_plan();
  return place != Plan::Place::kNone;
}

bool PlanFollower::batch_done(std::uint32_t epoch) {
  if (!plan_ || !plan_->running() || plan_->running_epoch() != epoch) return false;
  for (const IdentityPtr& operation : plan_->last()) pending_.erase(operation);
  plan_->batch_done();
  return plan_->at_step_end();
}

// ---- its end and its pauses ----

void PlanFollower::break_plan() {
  if (!plan_ || !halt_.ask()) return;
  if (node_.is_root()) {
    halt();
  } else {
    node_.send_to_parent(encode(MessageKind::kBreak, set_, PlanNotice{plan_->epoch(), 0}));
  }
}

void PlanFollower::halt() {
  halt_.begin(plan_->joined());
  node_.send_to_children(encode(MessageKind::kHalt, set_, PlanNotice{plan_->epoch(), 0}));
}

bool PlanFollower::receive(int from, MessageKind kind, const PlanNotice& notice) {
  const bool is_current = plan_ && notice.epoch == plan_->epoch();
  if (kind == MessageKind::kHalt) {
    node_.require_parent(from);
    if (!is_current || halt_.halted()) throw WireError("halt of a plan that is not installed");
    halt();
    return answer_halt();
  }
  node_.child_index(from);
  if (kind == MessageKind::kBreak) {
    if (notice.epoch > epoch_) throw WireError("message about a future plan");
    // Otherwise the plan has ended meanwhile, or the sender repeats this after a pause.
    if (is_current) break_plan();
    return false;
  }
  if (!is_current) throw WireError("halt report without a halt");
  halt_.report(from, notice.batch);
  return answer_halt();
}

// When all children have reported: passes their minimum on, or returns true on the root.
bool PlanFollower::answer_halt() {
  if (!halt_.complete()) return false;
  if (node_.is_root()) return true;
  const PlanNotice notice{plan_->epoch(), halt_.last_batch()};
  node_.send_to_parent(encode(MessageKind::kHalted, set_, notice));
  return false;
}

// ---- the root's decisions ----

bool PlanFollower::allows(DecisionItem::Kind kind) const {
  switch (kind) {
    case DecisionItem::Kind::kError:
      return true;
    case DecisionItem::Kind::kBatch:
    case DecisionItem::Kind::kDependencyQuery:
    case DecisionItem::Kind::kInstallPlan:
    case DecisionItem::Kind::kRememberPlan:
      return !plan_ || paused_;
    case DecisionItem::Kind::kUninstallPlan:
    case DecisionItem::Kind::kPausePlan:
    case DecisionItem::Kind::kResumePlan:
      return plan_ != nullptr;
    default:
      return !plan_;
  }
}

void PlanFollower::remember(std::size_t place, const DependencyQuery& query, std::uint64_t number) {
  if (!query.complete() || number != query.number()) {
    throw WireError("plan without a completed dependency query");
  }
  std::optional<Plan>& plan = plans_[place];
  if (plan_ && plan && plan_ == &*plan) throw WireError("plan in the place of the installed one");
  plan.emplace(query.step());
}

void PlanFollower::install(const DecisionItem& item, std::uint64_t last_batch) {
  std::optional<Plan>& plan = plans_[item.place];
  if (!plan) throw WireError("plan that this rank does not remember");
  leave();
  if (!item.choices.empty()) plan->set_choices(item.choices, item.rounds);
  plan->begin(epoch_ + 1, last_batch, item.skipped);
  plan_ = &*plan;
  ++epoch_;
  halt_.reset();
}

// Another plan takes the place of a paused one, or the plan ends. A batch that all ranks have
// joined runs to completion.
void PlanFollower::leave() {
  if (!plan_) return;
  if (plan_->running()) {
    for (const IdentityPtr& operation : plan_->last()) pending_.erase(operation);
  }
  plan_ = nullptr;
  paused_ = false;
}

// This rank may have joined one batch after the last one that all ranks have joined.
void PlanFollower::check_stop(std::uint64_t last) const {
  const std::uint64_t joined = plan_->joined();
  if (!halt_.halted() || last > joined || joined - last > (plan_->running() ? 1 : 0)) {
    throw WireError("plan stopped at an impossible batch");
  }
}

void PlanFollower::pause(std::uint64_t last) {
  if (paused_) throw WireError("pause of a plan that is paused");
  check_stop(last);
  paused_ = true;
  if (plan_->joined() > last && !plan_->withdraw()) halt_.ask();
}

void PlanFollower::resume(std::uint64_t last_batch) {
  if (!std::exchange(paused_, false)) throw WireError("resume of a plan that is not paused");
  plan_->resume(++epoch_, last_batch);
  // The wish for the end has come too late for this halt.
  const bool ends = halt_.end_wanted();
  halt_.reset();
  if (ends) break_plan();
}

void PlanFollower::uninstall(std::uint64_t last) {
  if (paused_) throw WireError("end of a plan that is paused");
  check_stop(last);
  if (plan_->joined() > last) plan_->withdraw();
  leave();
  halt_.reset();
}

}  // namespace horoplug
