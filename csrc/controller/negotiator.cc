#include "controller/negotiator.h"

#include <algorithm>
#include <utility>

namespace horoplug {

Negotiator::Negotiator(std::uint32_t set, TreePosition position, const Options& options)
    : set_(set),
      restart_(options.restart),
      node_(std::move(position)),
      state_(node_.position()),
      ready_(state_.names),
      plans_(set_, node_, state_.pending),
      learner_(node_.position().size() > 1 ? options.plan_after : 0,
               node_.position().children.size()),
      decisions_(node_.position().rank, options.tuning, state_, learner_),
      coordinator_(options, state_, plans_, learner_) {}

// ---- what this rank asks for ----

void Negotiator::submit(const IdentityPtr& operation, std::uint64_t dependency_stage) {
  state_.pending.add(operation, dependency_stage);
  enter(operation);
}

void Negotiator::join() {
  if (!plans_.installed()) {
    note_join(position().rank);
    return;
  }
  join_later_ = true;
  plans_.break_plan();
}

void Negotiator::close(int rank) {
  if (closed()) return;
  if (!is_root()) {
    node_.send_to_parent(encode(set_, Leave{rank}));
    return;
  }
  coordinator_.add_end(rank);
  plans_.break_plan();
}

void Negotiator::fail_all(const Status& status) {
  // Earlier errors and closings are published first, and so may be a plan.
  if (!plans_.installed()) flush();
  if (plans_.installed()) {
    failure_later_ = status;
    plans_.break_plan();
    return;
  }
  DecisionItem item;
  item.kind = DecisionItem::Kind::kFailAll;
  item.code = status.code;
  item.text = status.message;
  publish({item});
}

void Negotiator::batch_done(std::uint32_t plan, double now) {
  if (plan == 0) {
    if (is_root()) coordinator_.batch_done();
  } else if (plans_.batch_done(plan) && is_root() && coordinator_.plan_step_done(now)) {
    plans_.break_plan();
  }
}

// ---- messages ----

bool Negotiator::receive(int from, MessageKind kind, Reader& reader) {
  switch (kind) {
    case MessageKind::kReady:
      receive(from, decode<Ready>(reader));
      return true;
    case MessageKind::kDecisions:
      receive(from, decode<Decisions>(reader));
      return true;
    case MessageKind::kLeave:
      receive(from, decode<Leave>(reader));
      return true;
    case MessageKind::kJoin:
      receive(from, decode<Joined>(reader));
      return true;
    case MessageKind::kDependencyLabels:
      receive(from, decode<DependencyLabels>(reader));
      return true;
    case MessageKind::kBreak:
    case MessageKind::kHalt:
    case MessageKind::kHalted:
      receive(from, kind, decode<PlanNotice>(reader));
      return true;
    default:
      return false;
  }
}

void Negotiator::receive(int from, const Ready& ready) {
  const std::size_t child = node_.child_index(from);
  if (ready.agreement > agreement_) throw WireError("message of a future agreement");
  // It refers to operations that have failed meanwhile.
  if (ready.agreement < agreement_ || closed()) return;
  for (const std::uint32_t id : ready.ids) {
    const NameTable::Entry* known = state_.names.at(id);
    if (known == nullptr) throw WireError("unknown name id");
    pass_on(state_.readiness.add_child(child, known->name, known->signature));
  }
  for (const Request& request : ready.requests) {
    const bool is_whole = request.variants.size() == 1 && request.variants.front().ranks.empty();
    pass_on(is_whole ? state_.readiness.add_child(child, request.name,
                                                  request.variants.front().signature)
                     : state_.readiness.add_child(child, request.name, request.variants));
  }
}

void Negotiator::receive(int from, const Decisions& decisions) {
  node_.require_parent(from);
  if (decisions.agreement != agreement_) throw WireError("decisions of a different agreement");
  node_.send_to_children(encode(set_, decisions));
  for (const DecisionItem& item : decisions.items) apply(item);
}

void Negotiator::receive(int from, const Leave& leave) {
  node_.child_index(from);
  close(leave.rank);
}

void Negotiator::receive(int from, const Joined& joined) {
  const auto& below = position().subtrees[node_.child_index(from)];
  if (joined.agreement > agreement_) throw WireError("message of a future agreement");
  if (joined.agreement < agreement_ || closed()) return;
  if (std::find(below.begin(), below.end(), joined.rank) == below.end()) {
    throw WireError("join of a rank outside the sender's subtree");
  }
  if (state_.readiness.has_joined(joined.rank)) throw WireError("second join of the same rank");
  note_join(joined.rank);
}

void Negotiator::receive(int from, const DependencyLabels& labels) {
  node_.child_index(from);
  if (!closed() && learner_.add_answer(labels.query, labels.labels)) answer_dependency_query();
}

void Negotiator::receive(int from, MessageKind kind, const PlanNotice& notice) {
  if (!closed() && plans_.receive(from, kind, notice)) decide_after_halt();
}

// ---- what this rank and its children announce ----

// An operation is ready on this rank.
void Negotiator::enter(const IdentityPtr& operation) {
  if (plans_.installed() && plans_.submit(operation)) return;
  pass_on(state_.readiness.add_self(operation->name, operation->signature));
}

// An operation is complete in the subtree.
void Negotiator::pass_on(std::optional<ReadinessTable::Complete> complete) {
  if (!complete) return;
  if (is_root()) {
    coordinator_.add(std::move(*complete));
  } else {
    ready_.add(std::move(*complete));
  }
}

void Negotiator::note_join(int rank) {
  if (closed()) return;
  for (auto& complete : state_.readiness.join(rank)) pass_on(std::move(complete));
  if (is_root()) return;
  // Report readiness before the join: after the join the parent expects nothing more from this
  // rank.
  flush();
  node_.send_to_parent(encode(set_, Joined{agreement_, rank}));
}

void Negotiator::answer_dependency_query() {
  const DependencyQuery& query = learner_.query();
  if (!query.complete() || is_root()) return;
  node_.send_to_parent(encode(set_, DependencyLabels{query.number(), query.labels()}));
}

// ---- messages and decisions that are due ----

void Negotiator::flush() {
  if (plans_.join_next()) decisions_.add_plan_batch(plans_.plan());
  if (is_root()) {
    decide();
  } else if (!ready_.empty()) {
    node_.send_to_parent(ready_.take_message(set_, agreement_));
  }
}

void Negotiator::decide() {
  const bool beside_plan = plans_.installed();
  const auto items = beside_plan ? coordinator_.take_errors() : coordinator_.decide();
  if (!items.empty()) publish(items);
  if (!beside_plan || plans_.halt_state().asked() || !coordinator_.has_batch_beside_plan()) return;
  if (coordinator_.plan_is_abandoned()) {
    plans_.break_plan();
  } else {
    plans_.halt();
  }
}

// The plan is halted on all ranks.
void Negotiator::decide_after_halt() {
  if (!plans_.halt_state().end_wanted()) {
    publish(coordinator_.pause_plan());
    return;
  }
  publish(coordinator_.end_plan());
  if (failure_later_) fail_all(*std::exchange(failure_later_, std::nullopt));
}

void Negotiator::publish(const std::vector<DecisionItem>& items) {
  node_.send_to_children(encode(set_, Decisions{agreement_, items}));
  for (const DecisionItem& item : items) apply(item);
}

// ---- applying decisions ----

// What ranks have announced to each other in this agreement counts no more.
void Negotiator::forget_negotiation() {
  state_.readiness.clear();
  coordinator_.clear();
  ready_.clear();
}

void Negotiator::forget_everything() {
  state_.pending.clear();
  forget_negotiation();
  state_.readiness.end_join();
  learner_.reset();
}

void Negotiator::apply(const DecisionItem& item) {
  if (closed()) return;
  if (!plans_.allows(item.kind)) throw WireError("decision that does not match the plan state");
  switch (item.kind) {
    case DecisionItem::Kind::kBatch:
      decisions_.apply_batch(item);
      break;
    case DecisionItem::Kind::kDependencyQuery:
      learner_.begin_query(item.batch, item.operations);
      answer_dependency_query();
      break;
    case DecisionItem::Kind::kRememberPlan:
      plans_.remember(item.place, learner_.query(), item.batch);
      break;
    case DecisionItem::Kind::kInstallPlan:
      install_plan(item);
      break;
    case DecisionItem::Kind::kUninstallPlan:
    case DecisionItem::Kind::kPausePlan:
      stop_plan(item);
      break;
    case DecisionItem::Kind::kResumePlan:
      plans_.resume(decisions_.last_batch());
      coordinator_.plan_resumed(decisions_.last_batch());
      break;
    case DecisionItem::Kind::kJoined:
      decisions_.apply_join(item);
      break;
    case DecisionItem::Kind::kError:
      decisions_.apply_error(item);
      break;
    case DecisionItem::Kind::kFailAll:
      ++agreement_;
      forget_everything();
      decisions_.add_end(item.kind, {item.code, item.text});
      break;
    case DecisionItem::Kind::kClose:
      close_set(item.rank);
      break;
  }
}

void Negotiator::install_plan(const DecisionItem& item) {
  plans_.install(item, decisions_.last_batch());
  coordinator_.plan_installed(decisions_.last_batch());
  ++agreement_;
  // From here on readiness counts for the plan.
  forget_negotiation();
  learner_.reset();
  // This rank may have asked to end the previous plan, in order to join, after the root had decided
  // to install this one.
  join_later_ |= state_.readiness.has_joined(position().rank);
  if (join_later_) plans_.break_plan();
  state_.readiness.end_join();
  for (const auto* entry : state_.pending.in_order()) enter(entry->first);
}

// The plan ends or is paused.
void Negotiator::stop_plan(const DecisionItem& item) {
  const std::uint32_t plan = plans_.plan().epoch();
  if (item.kind == DecisionItem::Kind::kPausePlan) {
    plans_.pause(item.batch);
  } else {
    plans_.uninstall(item.batch);
  }
  decisions_.add_plan_stop(item.kind, plan, item.batch);
  if (!plans_.installed()) return_to_negotiation();
}

// The plan has ended after the last batch.
void Negotiator::return_to_negotiation() {
  coordinator_.plan_uninstalled(decisions_.last_batch());
  ++agreement_;
  // What was announced beside the plan is announced anew, in the new agreement.
  forget_negotiation();
  // All other ready operations return to negotiation.
  for (const auto* entry : state_.pending.in_order()) enter(entry->first);
  if (std::exchange(join_later_, false)) note_join(position().rank);
}

// `rank`: the rank that has left, or kSetRemoved.
void Negotiator::close_set(int rank) {
  forget_everything();
  const std::string reason =
      rank == kSetRemoved
          ? "process set " + std::to_string(set_) + " was removed"
          : "rank " + std::to_string(rank) +
                " has shut down or its program has ended, so no operation can run any more; on "
                "every rank, " +
                restart_;
  end_ = {HP_SHUT_DOWN, reason};
  decisions_.add_end(DecisionItem::Kind::kClose, end_, rank);
}

}  // namespace horoplug
