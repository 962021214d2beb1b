#include "engine/scheduler.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "base/time.h"
#include "base/wire.h"
#include "controller/messages/messages.h"
#include "engine/operations/submission.h"

namespace horoplug {

// An operation was submitted, decided or done.
RunningTime Scheduler::note_event() {
  parts_.activity.last_event = steady_now();
  return parts_.clock.at(parts_.activity.last_event);
}

void Scheduler::apply_failures() {
  const auto fails = [](const auto& entry) { return entry.second->negotiator.fails_all(); };
  const auto& sets = parts_.registry.sets();
  if (std::any_of(sets.begin(), sets.end(), fails)) negotiate();
}

void Scheduler::accept(const OperationPtr& operation) {
  ProcessSet* const set = parts_.registry.find(operation->members->set);
  operation->pending_since = note_event();
  if (set == nullptr) {
    parts_.completion.end(operation, {HP_INVALID_ARGUMENT, "the process set was removed"});
    return;
  }
  set->last_event = operation->pending_since;
  const bool transfers = is_point_to_point(operation->signature.op);
  const Status& end = transfers ? set->end_of_transfers : set->negotiator.end();
  if (!end.ok()) return parts_.completion.end(operation, end);
  parts_.tracing.submitted(*operation);
  if (transfers) return parts_.point_to_point.submit(operation);
  set->pending.emplace(operation->name, operation);
  if (operation->signature.op == OpKind::kJoin) {
    set->negotiator.join();
  } else {
    set->negotiator.submit(operation->name, operation->signature, operation->dependency_epoch);
  }
}

bool Scheduler::update_submissions_wanted() {
  std::size_t wanted = std::numeric_limits<std::size_t>::max();
  for (const auto& [id, set] : parts_.registry.sets()) {
    wanted = std::min(wanted, set->negotiator.submissions_wanted());
  }
  return parts_.submissions.set_wanted(wanted);
}

// ---- negotiation ----

bool Scheduler::negotiate() {
  bool busy = false;
  std::size_t cached_names = 0;
  for (const auto& [id, set] : parts_.registry.sets()) {
    set->negotiator.flush();
    for (auto& message : set->negotiator.take_outgoing()) {
      parts_.mesh.send_control(message.to, std::move(message.message));
      busy = true;
    }
    auto decisions = set->negotiator.take_decisions();
    parts_.tracing.cycle(*set, decisions.size());
    for (auto& decision : decisions) apply(*set, decision);
    busy |= !decisions.empty();
    for (const Trial& trial : set->negotiator.take_trials()) parts_.tuning_log.write(id, trial);
    cached_names += set->negotiator.cached_names();
  }
  parts_.counters.cached_names = cached_names;
  return busy;
}

void Scheduler::apply(ProcessSet& set, Negotiator::Decision& decision) {
  set.last_event = note_event();
  switch (decision.kind) {
    case DecisionItem::Kind::kBatch: {
      auto operations = take_operations(set, decision);
      if (is_administrative(operations.front()->signature.op)) {
        administer(set, operations.front());
      } else {
        enqueue(set, decision, std::move(operations));
      }
      break;
    }
    case DecisionItem::Kind::kJoined: {
      // A batch of its own, so that it ends after everything that was decided before.
      decision.names = {op_kind_name(OpKind::kJoin)};
      auto operations = take_operations(set, decision);
      operations.front()->value = decision.rank;
      enqueue(set, decision, std::move(operations));
      break;
    }
    case DecisionItem::Kind::kError:
      parts_.completion.end(take_operations(set, decision), decision.status);
      break;
    case DecisionItem::Kind::kFailAll:
      fail_all(set, decision.status);
      break;
    case DecisionItem::Kind::kUninstallPlan:
      ++parts_.counters.broken_plans;
      [[fallthrough]];
    case DecisionItem::Kind::kPausePlan:
      withdraw(set, decision);
      break;
    case DecisionItem::Kind::kDependencyQuery:
    case DecisionItem::Kind::kInstallPlan:
    case DecisionItem::Kind::kResumePlan:
    case DecisionItem::Kind::kRememberPlan:
      break;  // only the negotiator is concerned
    case DecisionItem::Kind::kClose:
      close(set, decision);
      break;
  }
}

// Ranks wait for each other. An operation that this rank has not reported was submitted after the
// search: the rank waited in another set or group, where it has learned of the deadlock first. That
// operation begins again, as if it had been submitted after this decision, as it is on other ranks.
void Scheduler::fail_all(ProcessSet& set, const Status& status) {
  std::vector<OperationPtr> pending = set.take_pending();
  const auto is_reported = [](const OperationPtr& operation) {
    return operation->reported || operation->handle == 0;
  };
  const auto later = std::stable_partition(pending.begin(), pending.end(), is_reported);
  const std::vector<OperationPtr> again(later, pending.end());
  pending.erase(later, pending.end());
  parts_.tracing.ended(again, {});
  parts_.submissions.begin_again(set.members->set, again);
  parts_.completion.end(pending, status);
  parts_.point_to_point.fail(set.members->set, status);
}

// The set was removed, or a rank has left.
void Scheduler::close(ProcessSet& set, const Negotiator::Decision& decision) {
  const std::uint32_t number = set.members->set;
  parts_.completion.end(set.take_pending(), decision.status);
  const bool transfers_go_on =
      parts_.transfers_outlive_ranks && decision.rank != kSetRemoved && !set.asked_to_leave;
  if (!transfers_go_on) {
    set.end_of_transfers = decision.status;
    parts_.submissions.close_set(number, decision.status);
    parts_.point_to_point.fail(number, decision.status);
  } else if (number == 0) {
    parts_.submissions.end_collectives(decision.status);
  }
  if (number == 0) close_other_sets(decision.rank);
}

// Nothing can be submitted any more, in any set, once this rank knows that a rank has left the job.
// An operation that is pending in a set without that rank may wait for a member which learned of
// the leave before it submitted the operation.
void Scheduler::close_other_sets(int leaver) {
  for (const auto& [id, set] : parts_.registry.sets()) {
    if (id != 0) set->negotiator.close(leaver);
  }
}

std::vector<OperationPtr> Scheduler::take_operations(ProcessSet& set,
                                                     const Negotiator::Decision& decision) {
  std::vector<OperationPtr> operations;
  for (const std::string& name : decision.names) {
    const auto unknown = decision.unknown.find(name);
    if (unknown != decision.unknown.end()) {
      OperationPtr absent = make_absent(name, unknown->second, set.members);
      absent->submitted_at = parts_.activity.last_event;
      if (unknown->second.device >= 0) absent->gpu.device = parts_.gpu.device(-1);
      operations.push_back(std::move(absent));
      continue;
    }
    const auto found = set.pending.find(name);
    if (found == set.pending.end()) throw WireError("a decision about '" + name + "', which ended");
    found->second->decided = true;
    operations.push_back(std::move(found->second));
    set.pending.erase(found);
  }
  return operations;
}

void Scheduler::enqueue(ProcessSet& set, Negotiator::Decision& decision,
                        std::vector<OperationPtr> operations) {
  if (set.executor.idle()) set.last_progress = set.last_event;
  Batch batch{decision.batch, decision.plan, decision.tuning, std::move(operations),
              std::move(decision.absent)};
  // All ranks decide alike whether batches take turns, because the decisions of the global set,
  // which create sets, come in one order.
  if (batch.on_gpu()) batch.turns = parts_.gpu.turns();
  parts_.tracing.decided(set, batch);
  set.executor.enqueue(std::move(batch));
}

// Operations on process sets and shared buffers are done at once.
void Scheduler::administer(ProcessSet& set, const OperationPtr& operation) {
  set.negotiator.batch_done(0);
  const Shape& arguments = operation->signature.shapes.front();
  if (operation->signature.op == OpKind::kRemoveSet && arguments.size() > 1) {
    parts_.registry.finish_release(static_cast<std::uint32_t>(arguments.front()));
    return parts_.completion.end(operation, {});
  }
  parts_.registry.submit_releases_again(parts_.activity.last_event);
  switch (operation->signature.op) {
    case OpKind::kAddSet: {
      const std::uint32_t number =
          parts_.registry.create({arguments.begin(), arguments.end()}, set.last_event);
      on_new_set_(number);
      operation->value = number;
      return parts_.completion.end(operation, {});
    }
    case OpKind::kAddBuffer:
      parts_.buffers.create(*operation);
      return parts_.completion.end(operation, {});
    default:
      return parts_.registry.begin_removal(static_cast<std::uint32_t>(arguments.front()), operation,
                                           set.last_event);
  }
}

// A plan has ended or is paused. A batch that this rank has joined and others have not is taken
// back.
void Scheduler::withdraw(ProcessSet& set, const Negotiator::Decision& decision) {
  auto withdrawn = set.executor.end_plan(decision.plan, decision.batch);
  if (!withdrawn) return;
  parts_.tracing.ended(*withdrawn);
  for (const OperationPtr& operation : withdrawn->operations) {
    operation->outcomes.clear();
    // Until then, it may have waited for batches before it.
    operation->pending_since = std::max(operation->pending_since, set.last_progress);
    set.pending.emplace(operation->name, operation);
    operation->decided = false;
  }
}

// ---- execution ----

bool Scheduler::execute() {
  bool busy = false;
  for (const auto& [id, set] : parts_.registry.sets()) busy |= execute(*set);
  return busy;
}

bool Scheduler::execute(ProcessSet& set) {
  bool busy = false;
  while (true) {
    if (set.executor.next_is_on_gpu() && !parts_.gpu.may_start(set.members->set)) return busy;
    const std::optional<Batch> done = poll(set);
    if (set.executor.take_progress()) {
      parts_.activity.quiet_since = steady_now();
      set.last_progress = parts_.clock.at(parts_.activity.quiet_since);
      busy = true;
    }
    if (!done) return busy;
    finish(set, *done);
  }
}

std::optional<Batch> Scheduler::poll(ProcessSet& set) {
  try {
    return set.executor.poll();
  } catch (const PeerError& error) {
    fail(error);
  }
}

void Scheduler::fail(const PeerError& error) const {
  const std::string who = "rank " + std::to_string(error.rank());
  // A peer that has said goodbye is not dead. Batches that it left unfinished end like operations
  // that are submitted after it has left.
  if (parts_.peers.has_departed(error.rank())) {
    throw Error(HP_SHUT_DOWN, who + " has shut down while this was running");
  }
  throw Error(error.code(), who + ": " + error.what());
}

void Scheduler::finish(ProcessSet& set, const Batch& batch) {
  Counters& counters = parts_.counters;
  set.last_event = note_event();
  set.negotiator.batch_done(batch.plan, parts_.activity.last_event.time_since_epoch().count());
  ++counters.batches;
  if (batch.plan != 0) ++counters.planned_batches;
  for (const OperationPtr& operation : batch.operations) {
    counters.tensors += operation->signature.shapes.size();
    counters.bytes += static_cast<std::uint64_t>(payload_bytes(operation->signature));
  }
  parts_.tracing.ended(batch);
  parts_.completion.end(batch.operations, {});
}

// ---- sends and recvs ----

bool Scheduler::transfer() {
  PointToPoint& point_to_point = parts_.point_to_point;
  // As with batches: what peers have to hear has left before CUDA may block the host.
  const bool gpu_may_run = !point_to_point.on_gpu() || parts_.mesh.control_has_left();
  bool busy = false;
  try {
    busy = point_to_point.advance(gpu_may_run);
  } catch (const PeerError& error) {
    fail(error);
  }
  if (!busy) return false;
  const SteadyTime now = steady_now();
  for (auto& [operation, status] : point_to_point.take_ended()) {
    parts_.activity.last_event = now;
    if (status.ok()) {
      ++parts_.counters.tensors;
      parts_.counters.bytes += static_cast<std::uint64_t>(payload_bytes(operation->signature));
    }
    parts_.completion.end(operation, status);
  }
  parts_.activity.quiet_since = now;
  return true;
}

void Scheduler::trace_transfer(Batch& batch) {
  ProcessSet* const set = parts_.registry.find(batch.operations.front()->members->set);
  if (set != nullptr) parts_.tracing.decided(*set, batch);
}

}  // namespace horoplug
