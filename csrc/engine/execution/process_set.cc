#include "engine/execution/process_set.h"

#include "engine/operations/submission.h"

namespace horoplug {

// ---- operations ----

Status ProcessSet::accept(const OperationPtr& operation, RunningTime now) {
  operation->pending_since = last_event_ = now;
  const OpKind kind = operation->signature().op;
  if (is_point_to_point(kind)) return end_of_transfers_;
  if (negotiator_.closed()) return negotiator_.end();
  pending_.emplace(operation->identity, operation);
  if (kind == OpKind::kJoin) {
    negotiator_.join();
  } else {
    negotiator_.submit(operation->identity, operation->dependency_stage);
  }
  return {};
}

void ProcessSet::negotiate(Negotiated& into) {
  negotiator_.flush();
  into.messages = negotiator_.take_outgoing();
  negotiator_.take_decisions(into.decisions);
  into.trials = negotiator_.take_trials();
}

ProcessSet::Applied ProcessSet::apply(Negotiator::Decision& decision, RunningTime now,
                                      const std::function<void(Batch&)>& prepare) {
  last_event_ = now;
  Applied applied;
  switch (decision.kind) {
    case DecisionItem::Kind::kBatch:
    case DecisionItem::Kind::kJoined: {
      OperationList operations = take_operations(decision);
      if (decision.kind == DecisionItem::Kind::kJoined) {
        // It runs as a batch, so that it ends after everything that was decided before.
        operations.front()->value = decision.rank;
      } else if (is_administrative(operations.front()->signature().op)) {
        negotiator_.batch_done(0);
        applied.administrative = std::move(operations.front());
        break;
      }
      Batch batch{decision.batch, decision.plan, decision.tuning, std::move(operations),
                  std::move(decision.absent)};
      prepare(batch);
      enqueue(std::move(batch), now);
      break;
    }
    case DecisionItem::Kind::kError:
      applied.ended = take_operations(decision);
      break;
    case DecisionItem::Kind::kFailAll:
      fail_pending(applied);
      break;
    case DecisionItem::Kind::kClose:
      applied.ended = take_pending();
      break;
    case DecisionItem::Kind::kUninstallPlan:
    case DecisionItem::Kind::kPausePlan:
      withdraw(decision);
      break;
    case DecisionItem::Kind::kDependencyQuery:
    case DecisionItem::Kind::kInstallPlan:
    case DecisionItem::Kind::kResumePlan:
    case DecisionItem::Kind::kRememberPlan:
      break;  // only the negotiator is concerned
  }
  return applied;
}

OperationList ProcessSet::take_pending() {
  OperationList operations;
  for (auto& [name, operation] : pending_) operations.push_back(std::move(operation));
  pending_.clear();
  return operations;
}

OperationList ProcessSet::take_operations(const Negotiator::Decision& decision) {
  OperationList operations;
  operations.reserve(decision.operations.size());
  const int rank = members_->ranks[static_cast<std::size_t>(members_->index)];
  for (std::size_t i = 0; i < decision.operations.size(); ++i) {
    const IdentityPtr& identity = decision.operations[i];
    if (decision.lacks(i, rank)) {
      operations.push_back(make_absent(*identity, members_));
      continue;
    }
    const auto found = pending_.find(identity);
    if (found == pending_.end()) {
      throw WireError("a decision about '" + identity->name + "', which ended");
    }
    found->second->decided = true;
    operations.push_back(std::move(found->second));
    pending_.erase(found);
  }
  return operations;
}

// Ranks wait for each other. An operation that this rank has not reported was submitted after the
// search: the rank waited in another set or group, where it has learned of the deadlock first. That
// operation begins again, as if it had been submitted after this decision, as it is on other ranks.
void ProcessSet::fail_pending(Applied& applied) {
  for (OperationPtr& operation : take_pending()) {
    const bool is_reported = operation->reported || operation->handle == 0;
    (is_reported ? applied.ended : applied.again).push_back(std::move(operation));
  }
}

// A plan has ended or is paused. A batch that this rank has joined and others have not is taken
// back.
void ProcessSet::withdraw(const Negotiator::Decision& decision) {
  const auto withdrawn = executor_.end_plan(decision.plan, decision.batch);
  if (!withdrawn) return;
  withdrawn->end_trace();
  for (const OperationPtr& operation : withdrawn->operations) {
    operation->outcomes.clear();
    // Until then, it may have waited for batches before it.
    operation->pending_since = std::max(operation->pending_since, last_progress_);
    pending_.emplace(operation->identity, operation);
    operation->decided = false;
  }
}

void ProcessSet::enqueue(Batch&& batch, RunningTime now) {
  if (executor_.idle()) last_progress_ = now;
  executor_.enqueue(std::move(batch));
}

void ProcessSet::batch_done(const Batch& batch, RunningTime now) {
  last_event_ = now;
  negotiator_.batch_done(batch.plan, now.time_since_epoch().count());
  batch.end_trace();
}

// ---- time ----

void ProcessSet::break_plan() {
  constexpr Seconds kMostPatience{5};
  // The program may only have been slow: the next plan gets more time.
  if (negotiator_.held_up()) plan_patience_ = std::min(2 * plan_patience_, kMostPatience);
  negotiator_.break_plan();
}

// ---- the end ----

bool ProcessSet::leave() {
  if (std::exchange(leaving_, true)) return false;
  negotiator_.leave();
  return true;
}

bool ProcessSet::remove(const OperationPtr& removal, RunningTime now) {
  if (removal_) return false;
  removal_ = removal;
  last_progress_ = now;
  negotiator_.close();
  return true;
}

bool ProcessSet::removed() const {
  return removal_ && negotiator_.closed() && executor_.idle() && !executor_.gpu_is_busy() &&
         (!host_memory_ || host_memory_->quiet());
}

std::vector<OperationPtr> ProcessSet::take_all() {
  std::vector<OperationPtr> operations;
  for (const Batch& batch : executor_.take_all()) {
    batch.end_trace();
    operations.insert(operations.end(), batch.operations.begin(), batch.operations.end());
  }
  for (OperationPtr& operation : take_pending()) operations.push_back(std::move(operation));
  if (removal_) operations.push_back(take_removal());
  return operations;
}

}  // namespace horoplug
