#include "controller/negotiator.h"

#include <algorithm>

#include "controller/refusal.h"

namespace horoplug {

Negotiator::Negotiator(std::uint32_t set, TreePosition position, Options options)
    : set_(set),
      position_(std::move(position)),
      options_(std::move(options)),
      readiness_(position_),
      learner_(position_.size() > 1 ? options_.plan_after : 0, position_.children.size()),
      halt_(position_.children),
      queue_({options_.fusion_threshold, options_.fuse_groups, options_.cache_capacity,
              options_.max_outstanding}),
      tuner_(options_.tuner, options_.tuning, options_.placement) {}

// ---- what this rank asks for ----

void Negotiator::submit(const std::string& name, const Signature& signature,
                        std::uint64_t dependency_epoch) {
  pending_.add(name, signature, dependency_epoch);
  if (plan_) {
    submit_to_plan(name, signature);
  } else {
    enter(name, signature);
  }
}

void Negotiator::join() {
  if (!plan_) {
    note_join(position_.rank);
    return;
  }
  join_later_ = true;
  break_plan();
}

void Negotiator::leave() { request_end(position_.rank); }

void Negotiator::close() { request_end(kSetRemoved); }

void Negotiator::request_end(int rank) {
  if (closed()) return;
  if (!is_root()) {
    send_to_parent(encode_leave(set_, rank));
    return;
  }
  queue_.add_end(rank);
  break_plan();
}

void Negotiator::fail_all(const Status& status) {
  if (!plan_) flush();  // earlier errors and closings are published first, and so may be a plan
  if (plan_) {
    failure_later_ = status;
    break_plan();
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
    if (is_root()) queue_.batch_done();
  } else if (plan_ && plan_->running() && plan_->running_epoch() == plan) {
    for (const std::string& name : plan_->last()) pending_.erase(name);
    plan_->batch_done();
    if (is_root() && plan_->at_step_end()) {
      tuner_.step_done(plan_->last_choice(), now);
      if (tuner_.trial_over()) break_plan();
    }
  }
}

// ---- messages ----

std::size_t Negotiator::child_index(int from) const {
  const auto found = std::find(position_.children.begin(), position_.children.end(), from);
  if (found == position_.children.end()) throw WireError("the sender is not a child of this rank");
  return static_cast<std::size_t>(found - position_.children.begin());
}

void Negotiator::send_to_parent(Bytes message) {
  outgoing_.push_back({position_.parent, std::move(message)});
}

void Negotiator::send_to_children(const Bytes& message) {
  for (const int child : position_.children) outgoing_.push_back({child, message});
}

bool Negotiator::receive(int from, MessageKind kind, Reader& reader) {
  switch (kind) {
    case MessageKind::kReady:
      receive(from, decode_ready(reader));
      return true;
    case MessageKind::kDecisions:
      receive(from, decode_decisions(reader));
      return true;
    case MessageKind::kLeave:
      receive_leave(from, decode_leave(reader));
      return true;
    case MessageKind::kJoin:
      receive_join(from, decode_join(reader));
      return true;
    case MessageKind::kDependencyLabels:
      receive(from, decode_dependency_labels(reader));
      return true;
    case MessageKind::kBreak:
    case MessageKind::kHalt:
    case MessageKind::kHalted:
      receive(from, kind, decode_plan_notice(reader));
      return true;
    default:
      return false;
  }
}

void Negotiator::receive(int from, const Ready& ready) {
  const std::size_t child = child_index(from);
  if (ready.epoch > epoch_) throw WireError("message of a future epoch");
  // It refers to operations that have failed meanwhile.
  if (ready.epoch < epoch_ || closed()) return;
  for (const std::uint32_t id : ready.ids) {
    const NameTable::Entry* known = table_.at(id);
    if (known == nullptr) throw WireError("unknown name id");
    pass_on(readiness_.add_child(child, known->name, known->signature));
  }
  for (const Request& request : ready.requests) {
    const bool is_whole = request.variants.size() == 1 && request.variants.front().ranks.empty();
    pass_on(is_whole ? readiness_.add_child(child, request.name, request.variants.front().signature)
                     : readiness_.add_child(child, request.name, request.variants));
  }
}

void Negotiator::receive(int from, const Decisions& decisions) {
  if (from != position_.parent) throw WireError("the sender is not the parent of this rank");
  if (decisions.epoch != epoch_) throw WireError("decisions of a different epoch");
  send_to_children(encode(set_, decisions));
  for (const DecisionItem& item : decisions.items) apply(item);
}

void Negotiator::receive_leave(int from, int rank) {
  child_index(from);
  request_end(rank);
}

void Negotiator::receive_join(int from, const Joined& joined) {
  const auto& below = position_.subtrees[child_index(from)];
  if (joined.epoch > epoch_) throw WireError("message of a future epoch");
  if (joined.epoch < epoch_ || closed()) return;
  if (std::find(below.begin(), below.end(), joined.rank) == below.end()) {
    throw WireError("join of a rank outside the sender's subtree");
  }
  if (readiness_.has_joined(joined.rank)) throw WireError("second join of the same rank");
  note_join(joined.rank);
}

// ---- readiness ----

void Negotiator::enter(const std::string& name, const Signature& signature) {
  pass_on(readiness_.add_self(name, signature));
}

void Negotiator::note_join(int rank) {
  if (closed()) return;
  for (auto& complete : readiness_.join(rank)) pass_on(std::move(complete));
  if (is_root()) return;
  // Report readiness before the join: after the join the parent expects nothing more from this
  // rank.
  flush();
  send_to_parent(encode_join(set_, epoch_, rank));
}

void Negotiator::pass_on(std::optional<ReadinessTable::Complete> complete) {
  if (!complete) return;
  if (is_root()) {
    decide(std::move(*complete));
  } else {
    pass_up(std::move(*complete));
  }
}

void Negotiator::pass_up(ReadinessTable::Complete complete) {
  if (!complete.variants.empty()) {
    up_.requests.push_back({std::move(complete.name), std::move(complete.variants)});
    return;
  }
  const auto id = table_.find(complete.name);
  if (id && compatible(table_.at(*id)->signature, complete.signature)) {
    up_.ids.push_back(*id);
  } else {
    up_.requests.push_back({std::move(complete.name), {{std::move(complete.signature), {}}}});
  }
}

void Negotiator::decide(ReadinessTable::Complete complete) {
  RankRanges absent;
  if (complete.variants.size() == 1) {
    absent = readiness_.absent_from(complete.variants.front().ranks);
  }
  const std::string text = refusal(complete.name, complete.signature, complete.variants, absent);
  if (text.empty()) {
    queue_.add({std::move(complete.name), std::move(complete.signature), std::move(absent)});
  } else {
    queue_.add_error(complete.name, text);
  }
}

// ---- decisions ----

void Negotiator::flush() {
  if (plan_) join_plan();
  if (!is_root()) {
    flush_up();
  } else if (plan_) {
    flush_beside_plan();
  } else {
    flush_decisions();
  }
}

void Negotiator::flush_up() {
  if (up_.ids.empty() && up_.requests.empty()) return;
  std::sort(up_.ids.begin(), up_.ids.end());
  up_.epoch = epoch_;
  send_to_parent(encode(set_, up_));
  up_.ids.clear();
  up_.requests.clear();
}

void Negotiator::flush_decisions() {
  std::vector<DecisionItem> items = queue_.take_errors();
  // Operations that are ready when the set closes still run, so the end comes last. The same holds
  // for the end of a join: every rank waits for it, so nothing follows.
  const std::vector<DecisionItem> ends = queue_.take_ends();
  const bool all_joined = readiness_.all_joined();
  const bool run_all = all_joined || !ends.empty();
  while (queue_.has_batch(run_all)) {
    DecisionQueue::Batch batch = queue_.take_batch(table_);
    learner_.note_batch(batch.operations);
    items.push_back(std::move(batch.item));
    if (run_all) continue;
    if (consider_plan(items)) break;
  }
  if (all_joined) items.push_back(queue_.take_join(readiness_.last_joined()));
  items.insert(items.end(), ends.begin(), ends.end());
  if (!items.empty()) publish(items);
}

void Negotiator::publish(const std::vector<DecisionItem>& items) {
  send_to_children(encode(set_, Decisions{epoch_, items}));
  for (const DecisionItem& item : items) apply(item);
}

// What ranks have announced to each other in this epoch counts no more.
void Negotiator::forget_negotiation() {
  readiness_.clear();
  queue_.clear();
  up_ = {};
}

void Negotiator::forget_everything() {
  pending_.clear();
  forget_negotiation();
  readiness_.end_join();
  learner_.reset();
}

void Negotiator::advance_batch(std::uint64_t number) {
  if (number != last_batch_ + 1) throw WireError("batch number out of order");
  last_batch_ = number;
}

void Negotiator::apply_batch(const DecisionItem& item, Decision& decision) {
  advance_batch(item.batch);
  decision.batch = item.batch;
  decision.tuning = options_.tuning;
  for (const auto& member : item.members) {
    const NameTable::Entry* known = member.id ? table_.at(*member.id) : nullptr;
    const std::string name = member.name.empty() && known ? known->name : member.name;
    const PendingOperations::Pending* pending = pending_.find(name);
    const bool is_absent = member.absent.contains(position_.rank);
    if (is_absent != (pending == nullptr) || name.empty()) {
      throw WireError("batch with an operation that is not ready on this rank");
    }
    const Signature signature = is_absent ? member.signature : pending->signature;
    if (member.id && !member.name.empty() && !table_.set(*member.id, name, signature)) {
      throw WireError("name id out of order");
    }
    learner_.note(name, signature,
                  pending != nullptr && member.absent.empty() ? pending->dependency_epoch
                                                              : PlanLearner::kNoDependencyEpoch);
    if (is_absent) {
      decision.unknown.emplace(name, signature);
    } else {
      pending_.erase(name);
    }
    decision.names.push_back(name);
    decision.absent.push_back(member.absent);
  }
}

bool Negotiator::fits_plan_state(DecisionItem::Kind kind) const {
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

void Negotiator::apply(const DecisionItem& item) {
  if (closed()) return;
  if (!fits_plan_state(item.kind)) throw WireError("decision that does not match the plan state");
  Decision decision;
  decision.kind = item.kind;
  switch (item.kind) {
    case DecisionItem::Kind::kDependencyQuery:
      learner_.begin_query(item.batch, item.operations);
      answer_dependency_query();
      return;
    case DecisionItem::Kind::kRememberPlan:
      remember_plan(item);
      return;
    case DecisionItem::Kind::kInstallPlan:
      install_plan(item);
      return;
    case DecisionItem::Kind::kUninstallPlan:
      uninstall_plan(item);
      return;
    case DecisionItem::Kind::kPausePlan:
      pause_plan(item);
      return;
    case DecisionItem::Kind::kResumePlan:
      resume_plan();
      return;
    case DecisionItem::Kind::kBatch:
      apply_batch(item, decision);
      break;
    case DecisionItem::Kind::kJoined:
      if (!readiness_.has_joined(position_.rank))
        throw WireError("end of a join that this rank has not entered");
      advance_batch(item.batch);
      decision.batch = item.batch;
      decision.rank = item.rank;
      readiness_.end_join();
      break;
    case DecisionItem::Kind::kError:
      if (pending_.erase(item.name)) {
        decision.names.push_back(item.name);
      } else if (!readiness_.has_joined(position_.rank)) {
        throw WireError("error for an operation that is not ready on this rank");
      }
      decision.status = {item.code, item.text};
      break;
    case DecisionItem::Kind::kFailAll:
      ++epoch_;
      forget_everything();
      decision.status = {item.code, item.text};
      break;
    case DecisionItem::Kind::kClose:
      forget_everything();
      end_ = decision.status = {
          HP_SHUT_DOWN,
          item.rank == kSetRemoved
              ? "process set " + std::to_string(set_) + " was removed"
              : "rank " + std::to_string(item.rank) +
                    " has shut down or its program has ended; no operation can run any more until "
                    "every rank calls init() again"};
      break;
  }
  decisions_.push_back(std::move(decision));
}

}  // namespace horoplug
