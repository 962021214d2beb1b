// The part of the Negotiator that installs, follows, pauses and uninstalls plans.
#include <algorithm>
#include <limits>
#include <unordered_set>

#include "controller/negotiator.h"

namespace horoplug {
namespace {

// Pauses in a row, without a batch of the plan between them, after which the program is taken to do
// something else now.
constexpr int kMostIdlePauses = 8;

}  // namespace

// ---- learning ----

// Root only: adds what follows the batch that was just decided: a dependency query, that the ranks
// remember its step, and a plan. Returns whether a plan is installed, which takes the place of a
// paused one only between two of its steps.
bool Negotiator::consider_plan(std::vector<DecisionItem>& items) {
  if (const auto query = learner_.take_learned()) {
    DecisionItem& item = items.emplace_back();
    item.kind = DecisionItem::Kind::kRememberPlan;
    item.batch = *query;
    item.place = static_cast<std::uint32_t>(
        remembered_.add(learner_.query().step(), learner_.query().labels()));
  }
  const bool is_between_steps = !plan_ || plan_->slots_joined(halt_.last_batch()).empty();
  const auto place = remembered_.find_step(learner_.recent());
  if (place && is_between_steps && !plan_would_break(remembered_.at(*place).step)) {
    if (plan_) note_end_of_plan(false);
    remembered_.begun(*place, false);
    items.push_back(installation(*place, 0));
    return true;
  }
  if (const auto query = learner_.propose_query()) {
    DecisionItem& item = items.emplace_back();
    item.kind = DecisionItem::Kind::kDependencyQuery;
    item.batch = query->number;
    item.operations = query->operations;
  }
  return false;
}

// Root only: with the choices that the tuner wants by now. Batches can be skipped only with the
// choices of the last time.
DecisionItem Negotiator::installation(std::size_t place, std::size_t skipped) {
  DecisionItem item;
  item.kind = DecisionItem::Kind::kInstallPlan;
  item.place = static_cast<std::uint32_t>(place);
  item.skipped = static_cast<std::uint32_t>(skipped);
  if (skipped > 0) return item;
  RememberedPlans::Known& known = remembered_.at(place);
  auto choices =
      tuner_.choices(known.step, known.labels, options_.fusion_threshold, options_.fuse_groups);
  if (choices != known.choices || tuner_.rounds() != known.rounds) {
    known.choices = item.choices = std::move(choices);
    known.rounds = item.rounds = tuner_.rounds();
  }
  return item;
}

// A rank has joined, or has submitted an operation that the plan for this step lacks.
bool Negotiator::plan_would_break(std::span<const StepMember> step) const {
  if (readiness_.any_joined()) return true;
  std::unordered_set<std::string> keys;
  for (const StepMember& member : step) keys.insert(member.key);
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

void Negotiator::remember_plan(const DecisionItem& item) {
  const DependencyQuery& query = learner_.query();
  if (!query.complete() || item.batch != query.number()) {
    throw WireError("plan without a completed dependency query");
  }
  std::optional<Plan>& place = plans_[item.place];
  if (plan_ && place && plan_ == &*place) throw WireError("plan in the place of the installed one");
  place.emplace(query.step());
}

void Negotiator::install_plan(const DecisionItem& item) {
  std::optional<Plan>& plan = plans_[item.place];
  if (!plan) throw WireError("plan that this rank does not remember");
  leave_plan();
  if (!item.choices.empty()) plan->set_choices(item.choices, item.rounds);
  plan->begin(plan_epoch_ + 1, last_batch_, item.skipped);
  plan_ = &*plan;
  ++plan_epoch_;
  ++epoch_;
  // From here on readiness counts for the plan.
  forget_negotiation();
  learner_.reset();
  halt_.reset();
  resumed_after_ = last_batch_;
  idle_pauses_ = 0;
  // This rank may have asked to end the previous plan, in order to join, after the root had decided
  // to install this one.
  join_later_ |= readiness_.has_joined(position_.rank);
  if (join_later_) break_plan();
  readiness_.end_join();
  for (const auto* entry : pending_.in_order())
    submit_to_plan(entry->first, entry->second.signature);
}

// Another plan takes the place of a paused one, or the plan ends. A batch that all ranks have
// joined runs to completion.
void Negotiator::leave_plan() {
  if (!plan_) return;
  if (plan_->running()) {
    for (const std::string& name : plan_->last()) pending_.erase(name);
  }
  plan_ = nullptr;
  paused_ = false;
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
    run_beside_plan();
  }
}

void Negotiator::end_plan() {
  if (halt_.last_batch() != resumed_after_) learner_.interrupt();
  // A plan does not count as broken if the program has stopped running its step.
  note_end_of_plan(!tuner_.trial_over() && idle_pauses_ < kMostIdlePauses);
  DecisionItem item;
  item.kind = DecisionItem::Kind::kUninstallPlan;
  item.batch = halt_.last_batch();
  publish({item});
  if (failure_later_) fail_all(*std::exchange(failure_later_, std::nullopt));
}

// Root only.
void Negotiator::note_end_of_plan(bool broken) {
  const bool settled = tuner_.trial_over();
  const auto end = remembered_.ended(plan_->steps_joined(), broken);
  if (end.forgotten || settled) learner_.plan_ended(end.steps, settled);
  tuner_.plan_ended();
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

// Root only: the plan is halted for operations that it lacks and that are ready on all ranks. They
// run, and the plan is resumed, or another plan takes its place.
void Negotiator::run_beside_plan() {
  std::vector<DecisionItem> items(1);
  items.front().kind = DecisionItem::Kind::kPausePlan;
  items.front().batch = halt_.last_batch();
  queue_.continue_after(halt_.last_batch());
  const bool is_idle = halt_.last_batch() == resumed_after_;
  idle_pauses_ = is_idle ? idle_pauses_ + 1 : 0;
  if (!is_idle) learner_.interrupt();
  bool is_replaced = consider_continuation(items);
  while (!is_replaced && queue_.has_batch(false)) {
    DecisionQueue::Batch batch = queue_.take_batch(table_);
    learner_.note_batch(batch.operations);
    items.push_back(std::move(batch.item));
    is_replaced = consider_plan(items);
  }
  if (!is_replaced) items.emplace_back().kind = DecisionItem::Kind::kResumePlan;
  publish(items);
  resumed_after_ = last_batch_;
}

// Root only: another plan goes on with the operations that are ready. None of them has run outside
// of a plan, so that the place in the step is known.
bool Negotiator::consider_continuation(std::vector<DecisionItem>& items) {
  if (learner_.recent().size() > 0 || !queue_.has_batch(true)) return false;
  const auto found = remembered_.find_continuation(
      queue_.front(), plan_->slots_joined(halt_.last_batch()), pending_);
  if (!found) return false;
  note_end_of_plan(false);
  remembered_.begun(found->place, true);
  items.push_back(installation(found->place, found->skipped));
  return true;
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
  stop_plan(item);
  if (plan_->joined() > item.batch) plan_->withdraw();
  leave_plan();
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
