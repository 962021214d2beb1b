#include "controller/applied_decisions.h"

namespace horoplug {

void AppliedDecisions::advance(std::uint64_t number) {
  if (number != last_batch_ + 1) throw WireError("batch number out of order");
  last_batch_ = number;
}

void AppliedDecisions::apply_batch(const DecisionItem& item) {
  advance(item.batch);
  Decision decision;
  decision.kind = item.kind;
  decision.batch = item.batch;
  decision.tuning = tuning_;
  for (const auto& member : item.members) apply_member(member, decision);
  decisions_.push_back(std::move(decision));
}

void AppliedDecisions::apply_member(const DecisionItem::Member& member, Decision& decision) {
  const NameTable::Entry* known = member.id ? state_.names.at(*member.id) : nullptr;
  const std::string& name = member.name.empty() && known ? known->name : member.name;
  const PendingOperations::Entry* const pending = state_.pending.find(name);
  const bool is_absent = member.absent.contains(rank_);
  if (is_absent != (pending == nullptr) || name.empty()) {
    throw WireError("batch with an operation that is not ready on this rank");
  }
  const IdentityPtr operation = is_absent ? make_identity(name, member.signature) : pending->first;
  learner_.note(*operation, pending != nullptr && member.absent.empty()
                                ? pending->second.dependency_stage
                                : PlanLearner::kNoDependencyStage);
  if (member.id && !member.name.empty() &&
      !state_.names.set(*member.id, operation->name, operation->signature)) {
    throw WireError("name id out of order");
  }
  if (!is_absent) state_.pending.erase(operation);
  decision.operations.push_back(operation);
  decision.absent.push_back(member.absent);
}

void AppliedDecisions::apply_join(const DecisionItem& item) {
  if (!state_.readiness.has_joined(rank_)) {
    throw WireError("end of a join that this rank has not entered");
  }
  advance(item.batch);
  state_.readiness.end_join();
  Decision& decision = decisions_.emplace_back();
  decision.kind = item.kind;
  decision.batch = item.batch;
  decision.operations = {make_identity(op_kind_name(OpKind::kJoin), Signature())};
  decision.rank = item.rank;
}

void AppliedDecisions::apply_error(const DecisionItem& item) {
  Decision decision;
  decision.kind = item.kind;
  if (const PendingOperations::Entry* const pending = state_.pending.find(item.name)) {
    decision.operations.push_back(pending->first);
    state_.pending.erase(decision.operations.front());
  } else if (!state_.readiness.has_joined(rank_)) {
    throw WireError("error for an operation that is not ready on this rank");
  }
  decision.status = {item.code, item.text};
  decisions_.push_back(std::move(decision));
}

void AppliedDecisions::add_end(DecisionItem::Kind kind, const Status& status, int rank) {
  Decision& decision = decisions_.emplace_back();
  decision.kind = kind;
  decision.rank = rank;
  decision.status = status;
  fails_all_ |= kind == DecisionItem::Kind::kFailAll;
}

void AppliedDecisions::add_plan_batch(const Plan& plan) {
  Decision& decision = decisions_.emplace_back();
  decision.kind = DecisionItem::Kind::kBatch;
  decision.batch = plan.joined();
  decision.plan = plan.epoch();
  decision.operations.assign(plan.last().begin(), plan.last().end());
  decision.tuning = plan.last_tuning();
}

void AppliedDecisions::add_plan_stop(DecisionItem::Kind kind, std::uint32_t epoch,
                                     std::uint64_t last) {
  Decision& decision = decisions_.emplace_back();
  decision.kind = kind;
  decision.batch = last;
  decision.plan = epoch;
  last_batch_ = last;
}

}  // namespace horoplug
