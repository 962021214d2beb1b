#include "engine/operations/submission_queue.h"

#include <algorithm>

#include "base/time.h"

namespace horoplug {

// ---- called by any thread ----

Status SubmissionQueue::submit(std::span<const OperationPtr> operations) {
  Status refused;
  bool wakes;
  {
    std::lock_guard lock(mutex_);
    try {
      for (const OperationPtr& operation : operations) admit(operation);
    } catch (const Error& error) {
      refused = error.status();
    }
    submissions_waiting_.store(true);
    wakes = has_enough();
  }
  if (wakes) doorbell_.ring();
  return refused;
}

// Only the calling thread has to see that there is a request.
void SubmissionQueue::submit_and_run(const OperationPtr& operation, HandleTable::Wait& wait) {
  std::lock_guard lock(mutex_);
  admit(operation, &wait);
  requests_waiting_.store(true, std::memory_order_relaxed);
}

void SubmissionQueue::announce() {
  if (!submissions_waiting_.load() || requests_waiting_.exchange(true)) return;
  doorbell_.ring();
}

void SubmissionQueue::request_leave(const Status& why) {
  {
    std::lock_guard lock(mutex_);
    leave_requested_ = true;
    if (end_.ok()) end_ = why;
    requests_waiting_.store(true);
  }
  doorbell_.ring();
}

void SubmissionQueue::request_abort(const std::string& reason) {
  {
    std::lock_guard lock(mutex_);
    abort_requested_ = reason;
    requests_waiting_.store(true);
  }
  doorbell_.ring();
}

Status SubmissionQueue::end() const {
  std::lock_guard lock(mutex_);
  return end_;
}

Seconds SubmissionQueue::active_time() const {
  std::lock_guard lock(mutex_);
  return active_time_ + (in_flight_ == 0 ? Seconds::zero() : steady_now() - active_since_);
}

std::string SubmissionQueue::next_name(const Operation& operation) {
  const OpKind kind = operation.signature().op;
  const std::uint64_t number = ++unnamed_[{operation.members->set, kind}];
  return std::string(op_kind_name(kind)) + ".noname." + std::to_string(number);
}

// Under the lock. Throws Error if the operation cannot be submitted now.
void SubmissionQueue::admit(const OperationPtr& operation, HandleTable::Wait* wait) {
  const auto refuse = [&](hp_status code, const std::string& why) {
    throw Error(code, operation->describe() + " cannot run: " + why);
  };
  const OpKind kind = operation->signature().op;
  const std::uint32_t number = operation->members->set;
  const Status& end = end_.ok() && !is_point_to_point(kind) ? end_of_collectives_ : end_;
  if (!end.ok()) refuse(end.code, end.message);
  const auto found = sets_.find(number);
  if (found == sets_.end()) refuse(HP_INVALID_ARGUMENT, "the process set was removed");
  SetState& set = found->second;
  if (!set.end.ok()) refuse(set.end.code, set.end.message);
  if (set.joined) {
    refuse(HP_INVALID_ARGUMENT,
           "this rank has joined, and waits until every rank has called join()");
  }
  if (operation->name().empty()) {
    operation->identity = make_identity(next_name(*operation), *operation->identity);
    operation->is_numbered = true;
  }
  if (!set.in_flight.insert(operation->identity).second) {
    throw Error(HP_DUPLICATE_NAME,
                operation->describe() +
                    " is still in flight; wait for it before you submit another operation of the "
                    "same name, or give this one another name");
  }
  set.joined = kind == OpKind::kJoin;
  if (std::exchange(observations_seen_, handles_.result_observations()) != observations_seen_) {
    ++dependency_stage_;
  }
  operation->dependency_stage = dependency_stage_;
  operation->submitted_at = steady_now();
  if (++in_flight_ == 1) active_since_ = operation->submitted_at;
  is_urgent_ |= is_point_to_point(kind);
  handles_.add(operation, wait);
  queue_.push_back(operation);
}

// Under the lock. Whether the loop has to wake up for the entries of the queue.
bool SubmissionQueue::has_enough() {
  if (queue_.empty() || (queue_.size() < wanted_ && !is_urgent_)) return false;
  requests_waiting_.store(true);
  return true;
}

// ---- the thread that runs the loop ----

bool SubmissionQueue::take(bool starting, Requests& requests) {
  if (!holds_any()) return false;
  requests.operations.clear();
  std::lock_guard lock(mutex_);
  // Whoever sets these flags has had the lock, or does so because of what was queued under it.
  requests_waiting_.store(false, std::memory_order_relaxed);
  if (starting && !abort_requested_ && !leave_requested_) return false;
  submissions_waiting_.store(false, std::memory_order_relaxed);
  is_urgent_ = false;
  requests.operations.swap(queue_);
  requests.abort_reason = std::exchange(abort_requested_, std::nullopt);
  requests.leave = leave_requested_;
  return true;
}

bool SubmissionQueue::set_wanted(std::size_t count) {
  if (count == last_wanted_) return false;
  last_wanted_ = count;
  std::lock_guard lock(mutex_);
  wanted_ = count;
  return has_enough();
}

void SubmissionQueue::open_set(std::uint32_t set) {
  std::lock_guard lock(mutex_);
  sets_.try_emplace(set);
}

void SubmissionQueue::close_set(std::uint32_t set, const Status& why) {
  std::lock_guard lock(mutex_);
  if (set == 0) {
    if (end_.ok()) end_ = why;
    return;
  }
  const auto found = sets_.find(set);
  if (found != sets_.end()) found->second.end = why;
}

void SubmissionQueue::end_collectives(const Status& why) {
  std::lock_guard lock(mutex_);
  if (end_of_collectives_.ok()) end_of_collectives_ = why;
}

void SubmissionQueue::forget_set(std::uint32_t set) {
  std::lock_guard lock(mutex_);
  if (const auto found = sets_.find(set); found != sets_.end()) {
    count_ended(found->second.in_flight.size());
    sets_.erase(found);
  }
  restart_numbering_locked(set);
}

void SubmissionQueue::fail(const Status& why) {
  std::lock_guard lock(mutex_);
  if (end_.ok() || (leave_requested_ && why.code != HP_SHUT_DOWN)) end_ = why;
}

void SubmissionQueue::forget(std::span<const OperationPtr> operations) {
  std::lock_guard lock(mutex_);
  for (const OperationPtr& operation : operations) {
    if (operation->absent) continue;
    const std::uint32_t number = operation->members->set;
    const auto set = sets_.find(number);
    if (set != sets_.end()) count_ended(set->second.in_flight.erase(operation->identity));
    if (operation->signature().op != OpKind::kJoin) continue;
    if (set != sets_.end()) set->second.joined = false;
    // Ranks that joined early have counted fewer operations.
    restart_numbering_locked(number);
  }
}

// Under the lock.
void SubmissionQueue::count_ended(std::size_t operations) {
  if (operations == 0) return;
  in_flight_ -= operations;
  if (in_flight_ == 0) active_time_ += steady_now() - active_since_;
}

void SubmissionQueue::begin_again(std::uint32_t set, std::span<const OperationPtr> again) {
  std::vector<OperationPtr> later(again.begin(), again.end());
  std::lock_guard lock(mutex_);
  restart_numbering_locked(set);
  const auto by_submission = [](const auto& a, const auto& b) { return a->handle < b->handle; };
  std::sort(later.begin(), later.end(), by_submission);
  queue_.insert(queue_.begin(), later.begin(), later.end());
  std::vector<OperationPtr> renamed;
  for (const OperationPtr& operation : queue_) {
    const bool counts = operation->is_numbered && !is_point_to_point(operation->signature().op);
    if (counts && operation->members->set == set) renamed.push_back(operation);
  }
  const auto found = sets_.find(set);
  if (found != sets_.end()) {
    NameSet& in_flight = found->second.in_flight;
    for (const OperationPtr& operation : renamed) in_flight.erase(operation->identity);
    for (const OperationPtr& operation : renamed) {
      handles_.rename(*operation, make_identity(next_name(*operation), *operation->identity));
      in_flight.insert(operation->identity);
    }
  }
  if (!later.empty()) requests_waiting_.store(true);
}

// Sends and recvs are not matched by their names, and may go on under them.
void SubmissionQueue::restart_numbering_locked(std::uint32_t set) {
  std::erase_if(unnamed_, [&](const auto& entry) {
    return entry.first.first == set && !is_point_to_point(entry.first.second);
  });
}

std::vector<OperationPtr> SubmissionQueue::drain() {
  std::lock_guard lock(mutex_);
  return std::exchange(queue_, {});
}

}  // namespace horoplug
