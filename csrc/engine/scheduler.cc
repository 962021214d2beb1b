#include "engine/scheduler.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "base/time.h"
#include "base/wire.h"
#include "controller/messages/messages.h"

namespace horoplug {

// An operation was submitted, decided or done.
RunningTime Scheduler::note_event() {
  parts_.activity.last_event = steady_now();
  return parts_.clock.at(parts_.activity.last_event);
}

void Scheduler::apply_failures() {
  const auto fails = [](const ProcessSet& set) { return set.negotiator().fails_all(); };
  if (std::ranges::any_of(parts_.registry.sets(), fails)) negotiate();
}

void Scheduler::accept(const OperationPtr& operation) {
  ProcessSet* const set = parts_.registry.find(operation->members->set);
  const RunningTime now = note_event();
  const Status end = set != nullptr ? set->accept(operation, now)
                                    : Status{HP_INVALID_ARGUMENT, "the process set was removed"};
  if (!end.ok()) return parts_.completion.end(operation, end);
  parts_.tracing.submitted(*operation);
  if (is_point_to_point(operation->signature().op)) parts_.point_to_point.submit(operation);
}

bool Scheduler::update_submissions_wanted() {
  std::size_t wanted = std::numeric_limits<std::size_t>::max();
  for (const ProcessSet& set : parts_.registry.sets()) {
    wanted = std::min(wanted, set.negotiator().submissions_wanted());
  }
  return parts_.submissions.set_wanted(wanted);
}

// ---- negotiation ----

bool Scheduler::negotiate() {
  bool busy = false;
  std::size_t cached_names = 0;
  for (ProcessSet& set : parts_.registry.sets()) {
    set.negotiate(negotiated_);
    auto& [messages, decisions, trials] = negotiated_;
    for (auto& message : messages) {
      parts_.mesh.send_control(message.to, std::move(message.message));
    }
    parts_.tracing.cycle(set, decisions.size());
    for (auto& decision : decisions) apply(set, decision);
    busy |= !messages.empty() || !decisions.empty();
    for (const Trial& trial : trials) parts_.tuning_log.write(set.number(), trial);
    cached_names += set.negotiator().cached_names();
  }
  parts_.counters.cached_names = cached_names;
  return busy;
}

void Scheduler::apply(ProcessSet& set, Negotiator::Decision& decision) {
  const RunningTime now = note_event();
  const auto applied = set.apply(decision, now, [&](Batch& batch) { prepare(set, batch); });
  switch (decision.kind) {
    case DecisionItem::Kind::kFailAll:
      parts_.tracing.ended(applied.again, {});
      parts_.submissions.begin_again(set.number(), applied.again);
      parts_.completion.end(applied.ended, decision.status);
      return parts_.point_to_point.fail(set.number(), decision.status);
    case DecisionItem::Kind::kClose:
      parts_.completion.end(applied.ended, decision.status);
      return close(set, decision);
    case DecisionItem::Kind::kUninstallPlan:
      ++parts_.counters.broken_plans;
      return;
    default:
      if (applied.administrative) administer(applied.administrative, now);
      parts_.completion.end(applied.ended, decision.status);
  }
}

// A batch was decided and will run.
void Scheduler::prepare(const ProcessSet& set, Batch& batch) {
  if (batch.on_gpu()) {
    // All ranks decide alike whether batches take turns, because the decisions of the global set,
    // which create sets, come in one order.
    batch.turns = parts_.gpu.turns();
    for (const OperationPtr& operation : batch.operations) {
      if (operation->absent) operation->gpu.device = parts_.gpu.device(-1);
    }
  }
  parts_.tracing.decided(set, batch);
}

// The set was removed, or a rank has left.
void Scheduler::close(ProcessSet& set, const Negotiator::Decision& decision) {
  const bool transfers_go_on =
      parts_.transfers_outlive_ranks && decision.rank != kSetRemoved && !set.leaving();
  if (!transfers_go_on) {
    set.end_transfers(decision.status);
    parts_.submissions.close_set(set.number(), decision.status);
    parts_.point_to_point.fail(set.number(), decision.status);
  } else if (set.number() == 0) {
    parts_.submissions.end_collectives(decision.status);
  }
  if (set.number() == 0) close_other_sets(decision.rank);
}

// Nothing can be submitted any more, in any set, once this rank knows that a rank has left the job.
// An operation that is pending in a set without that rank may wait for a member which learned of
// the leave before it submitted the operation.
void Scheduler::close_other_sets(int leaver) {
  for (ProcessSet& set : parts_.registry.sets()) {
    if (set.number() != 0) set.close(leaver);
  }
}

// Operations on process sets and shared buffers are done at once.
void Scheduler::administer(const OperationPtr& operation, RunningTime now) {
  const Shape& arguments = operation->signature().shapes.front();
  if (operation->signature().op == OpKind::kReleaseSet) {
    parts_.registry.finish_release(static_cast<std::uint32_t>(arguments.front()));
    return parts_.completion.end(operation, {});
  }
  parts_.registry.submit_releases_again(now);
  switch (operation->signature().op) {
    case OpKind::kAddSet: {
      const std::uint32_t number =
          parts_.registry.create({arguments.begin(), arguments.end()}, now);
      on_new_set_(number);
      operation->value = number;
      return parts_.completion.end(operation, {});
    }
    case OpKind::kAddBuffer:
      parts_.buffers.create(*operation);
      return parts_.completion.end(operation, {});
    default:
      return parts_.registry.begin_removal(static_cast<std::uint32_t>(arguments.front()), operation,
                                           now);
  }
}

// ---- execution ----

bool Scheduler::execute() {
  bool busy = false;
  for (ProcessSet& set : parts_.registry.sets()) busy |= execute(set);
  return busy;
}

bool Scheduler::execute(ProcessSet& set) {
  bool busy = false;
  while (true) {
    if (set.executor().next_is_on_gpu() && !parts_.gpu.may_start(set.number())) return busy;
    const std::optional<Batch> done = poll(set);
    if (set.take_progress()) {
      parts_.activity.quiet_since = steady_now();
      set.note_progress(parts_.clock.at(parts_.activity.quiet_since));
      busy = true;
    }
    if (!done) return busy;
    finish(set, *done);
  }
}

std::optional<Batch> Scheduler::poll(ProcessSet& set) {
  try {
    return set.poll();
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
  set.batch_done(batch, note_event());
  ++counters.batches;
  if (batch.plan != 0) ++counters.planned_batches;
  for (const OperationPtr& operation : batch.operations) {
    counters.tensors += operation->signature().shapes.size();
    counters.bytes += static_cast<std::uint64_t>(operation->identity->bytes);
  }
  parts_.completion.end(batch.operations, {});
}

// ---- sends and recvs ----

bool Scheduler::transfer() {
  PointToPoint& point_to_point = parts_.point_to_point;
  // As with batches: what peers have to hear has left before CUDA may block the calling thread.
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
      parts_.counters.bytes += static_cast<std::uint64_t>(operation->identity->bytes);
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
