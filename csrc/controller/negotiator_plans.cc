// The part of the Negotiator that installs, follows, pauses and uninstalls plans.
#include <algorithm>
#include <limits>
#include <unordered_set>

#include "controller/negotiator.h"

namespace horoplug {
namespace {

// Pauses in a row, without a batch of the plan between them, after which the program is taken to do
// something else now. A loop of such operations deserves a plan of its own.
constexpr int kMostIdlePauses = 8;

}  // namespace

// ---- learning ----

// Root only: the item that follows a batch that was just decided: a dependency query, a plan, or
// none.
std::optional<DecisionItem> Negotiator::consider_plan() {
  const auto proposal = learner_.propose();
  if (!proposal) return std::nullopt;
  DecisionItem item;
  item.batch = proposal->number;
  if (!proposal->install) {
    item.kind = DecisionItem::Kind::kDependencyQuery;
    item.operations = proposal->operations;
    return item;
  }
  if (plan_would_break()) return std::nullopt;
  item.kind = DecisionItem::Kind::kInstallPlan;
  const DependencyQuery& query = learner_.query();
  item.choices =
      tuner_.choices(query.step(), query.labels(), options_.fusion_threshold, options_.fuse_groups);
  item.rounds = tuner_.rounds();
  return item;
}

// A rank has joined, or has submitted an operation that the plan lacks.
bool Negotiator::plan_would_break() const {
  if (readiness_.any_joined()) return true;
  std::unordered_set<std::string> keys;
  for (const StepMember& member : learner_.query().step()) keys.insert(member.key);
  return readiness_.any([&](const std::string& name, const Signature& signature) {
    return !keys.contains(step_key(name, signature));
  });
}

void Negotiator::answer_dependency_query() {
  const DependencyQuery& query = learner_.query();
  if (!query.complete() || is_root()) return;
  send_to_parent(encode(set_, DependencyLabels{query.number(), query.labels()}));
}

void Negotiator::receive(int from, const DependencyLabels& labels) {
  child_index(from);
  if (!closed() && learner_.add_answer(labels.query, labels.labels)) answer_dependency_query();
}

// ---- installing ----

void Negotiator::install_plan(const DecisionItem& item) {
  const DependencyQuery& query = learner_.query();
  if (!query.complete() || item.batch != query.number()) {
    throw WireError("plan without a completed dependency query");
  }
  ++epoch_;
  plan_.emplace(++plan_epoch_, last_batch_, query.step(), item.choices, item.rounds);
  // From here on readiness counts for the plan.
  forget_negotiation();
  learner_.reset();
  halt_.reset();
  resumed_after_ = last_batch_;
  idle_pauses_ = 0;
  if (readiness_.has_joined(position_.rank)) {
    join_later_ = true;
    break_plan();
  }
  readiness_.end_join();
  for (const auto* entry : pending_.in_order())
    submit_to_plan(entry->first, entry->second.signature);
}

// Every rank comes to the same conclusion about which operations belong to the plan, because that
// depends on the key alone.
void Negotiator::submit_to_plan(const std::string& name, const Signature& signature) {
  if (!plan_->contains(step_key(name, signature))) {
    enter(name, signature);
  } else if (!plan_->ready(name, signature)) {
    break_plan();
  }
}

std::size_t Negotiator::submissions_wanted() const {
  if (!plan_ || halt_.asked()) return 1;
  const std::size_t missing = plan_->missing();
  return missing > 0 ? missing : std::numeric_limits<std::size_t>::max();
}

void Negotiator::join_plan() {
  if (halt_.halted() || !plan_->join_next()) return;
  Decision decision;
  decision.kind = DecisionItem::Kind::kBatch;
  decision.batch = plan_->joined();
  decision.plan = plan_->epoch();
  decision.names = plan_->last();
  decision.tuning = plan_->last_tuning();
  decisions_.push_back(std::move(decision));
}

// ---- operations beside the plan ----

void Negotiator::flush_beside_plan() {
  const std::vector<DecisionItem> errors = queue_.take_errors();
  if (!errors.empty()) publish(errors);
  if (halt_.asked() || !queue_.has_batch(false)) return;
  if (idle_pauses_ >= kMostIdlePauses) {
    break_plan();
  } else {
    halt();
  }
}

// ---- leaving ----

void Negotiator::break_plan() {
  if (!plan_ || !halt_.ask()) return;
  if (is_root()) {
    halt();
  } else {
    send_to_parent(encode(MessageKind::kBreak, set_, PlanNotice{plan_->epoch(), 0}));
  }
}

void Negotiator::receive(int from, MessageKind kind, const PlanNotice& notice) {
  if (closed()) return;
  const std::uint32_t current = plan_ ? plan_->epoch() : 0;
  const bool is_current = plan_ && notice.epoch == current;
  if (kind == MessageKind::kHalt) {
    if (from != position_.parent) throw WireError("the sender is not the parent of this rank");
    if (!is_current || halt_.halted()) throw WireError("halt of a plan that is not installed");
    halt();
    return;
  }
  child_index(from);
  if (kind == MessageKind::kBreak) {
    if (notice.epoch > plan_epoch_) throw WireError("message about a future plan");
    // Otherwise the plan has ended meanwhile, or the sender repeats this after a pause.
    if (is_current) break_plan();
    return;
  }
  if (!is_current) throw WireError("halt report without a halt");
  halt_.report(from, notice.batch);
  answer_halt();
}

void Negotiator::halt() {
  halt_.begin(plan_->joined());
  send_to_children(encode(MessageKind::kHalt, set_, PlanNotice{plan_->epoch(), 0}));
  answer_halt();
}

void Negotiator::answer_halt() {
  if (!halt_.complete()) return;
  if (!is_root()) {
    const PlanNotice notice{plan_->epoch(), halt_.last_batch()};
    send_to_parent(encode(MessageKind::kHalted, set_, notice));
  } else if (halt_.end_wanted()) {
    end_plan();
  } else {
    pause_and_resume_plan();
  }
}

void Negotiator::end_plan() {
  learner_.plan_ended(plan_->steps_joined(), tuner_.trial_over());
  tuner_.plan_ended();
  DecisionItem item;
  item.kind = DecisionItem::Kind::kUninstallPlan;
  item.batch = halt_.last_batch();
  publish({item});
  if (failure_later_) fail_all(*std::exchange(failure_later_, std::nullopt));
}

// The plan has come to batch `item.batch` on all ranks; this rank may have joined one more.
void Negotiator::stop_plan(const DecisionItem& item) {
  const std::uint64_t joined = plan_->joined();
  if (!halt_.halted() || item.batch > joined || joined - item.batch > (plan_->running() ? 1 : 0)) {
    throw WireError("plan stopped at an impossible batch");
  }
  Decision decision;
  decision.kind = item.kind;
  decision.batch = item.batch;
  decision.plan = plan_->epoch();
  decisions_.push_back(std::move(decision));
  last_batch_ = item.batch;
}

// Root only: runs the operations beside the plan that are ready on all ranks.
void Negotiator::pause_and_resume_plan() {
  std::vector<DecisionItem> items(1);
  items.front().kind = DecisionItem::Kind::kPausePlan;
  items.front().batch = halt_.last_batch();
  queue_.continue_after(halt_.last_batch());
  while (queue_.has_batch(false)) items.push_back(queue_.take_batch(table_).item);
  items.emplace_back().kind = DecisionItem::Kind::kResumePlan;
  idle_pauses_ = halt_.last_batch() == resumed_after_ ? idle_pauses_ + 1 : 0;
  publish(items);
  resumed_after_ = last_batch_;
}

void Negotiator::pause_plan(const DecisionItem& item) {
  if (paused_) throw WireError("pause of a plan that is paused");
  paused_ = true;
  stop_plan(item);
  if (plan_->joined() > item.batch && !plan_->withdraw()) halt_.ask();
}

void Negotiator::resume_plan() {
  if (!std::exchange(paused_, false)) throw WireError("resume of a plan that is not paused");
  plan_->resume(++plan_epoch_, last_batch_);
  // The wish for the end has come too late for this halt.
  const bool ends = halt_.end_wanted();
  halt_.reset();
  if (ends) break_plan();
}

void Negotiator::uninstall_plan(const DecisionItem& item) {
  if (paused_) throw WireError("end of a plan that is paused");
  // A batch that all ranks have joined runs to completion.
  if (plan_->running() && plan_->joined() == item.batch) {
    for (const std::string& name : plan_->last()) pending_.erase(name);
  }
  stop_plan(item);
  plan_.reset();
  halt_.reset();
  if (is_root()) queue_.continue_after(item.batch);
  ++epoch_;
  // What was announced beside the plan is announced anew, in the new epoch.
  forget_negotiation();

  // All other ready operations return to negotiation.
  for (const auto* entry : pending_.in_order()) enter(entry->first, entry->second.signature);
  if (std::exchange(join_later_, false)) note_join(position_.rank);
}

}  // namespace horoplug
