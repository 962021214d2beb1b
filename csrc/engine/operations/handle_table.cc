#include "engine/operations/handle_table.h"

#include <sys/syscall.h>

#include "base/time.h"

namespace horoplug {

void HandleTable::add(const OperationPtr& operation, Wait* wait) {
  std::lock_guard lock(mutex_);
  operation->handle = ++last_handle_;
  operations_.emplace(operation->handle, operation);
  last_event_.store(operation->submitted_at, std::memory_order_relaxed);
  if (operation->counts_caller) threads_.note_submission();
  if (wait == nullptr) return;
  operation->waiting.released = true;
  wait->begin_locked(operation);
}

void HandleTable::keep(const OperationPtr& operation) {
  std::lock_guard lock(mutex_);
  operation->waiting.released = false;
  operations_.emplace(operation->handle, operation);
}

void HandleTable::finish_all(std::span<const OperationPtr> operations) {
  std::vector<std::pair<hp_done, void*>> calls;
  {
    std::lock_guard lock(mutex_);
    last_event_.store(steady_now(), std::memory_order_relaxed);
    for (const OperationPtr& operation : operations) {
      if (operation->handle == 0) continue;  // only other ranks have submitted it
      auto& waiting = operation->waiting;
      if (waiting.released) operations_.erase(operation->handle);
      operation->done.store(true, std::memory_order_release);
      if (waiting.sleepers > 0) waiting.ended.notify_all();
      if (waiting.done != nullptr) calls.emplace_back(waiting.done, waiting.done_context);
    }
    if (!calls.empty()) callbacks_ -= static_cast<int>(calls.size());
  }
  for (const auto& [done, context] : calls) done(context);
}

bool HandleTable::on_done(hp_handle handle, hp_done done, void* context) {
  {
    std::lock_guard lock(mutex_);
    const OperationPtr& operation = find(handle);
    auto& waiting = operation->waiting;
    if (done == nullptr) throw Error(HP_INVALID_ARGUMENT, "no function to call");
    if (waiting.done != nullptr) {
      throw Error(HP_INVALID_ARGUMENT, "this operation has a completion function already");
    }
    waiting.done = done;
    waiting.done_context = context;
    if (!operation->done.load()) {
      ++callbacks_;
      return true;
    }
  }
  done(context);
  return false;
}

const OperationPtr& HandleTable::find(hp_handle handle) const {
  const auto found = operations_.find(handle);
  if (found == operations_.end() || found->second->waiting.released) {
    throw Error(HP_INVALID_ARGUMENT, "unknown handle " + std::to_string(handle));
  }
  return found->second;
}

Status HandleTable::status_of(const Operation& operation) const {
  if (!operation.done.load(std::memory_order_acquire)) return {HP_IN_PROGRESS, "not done yet"};
  note_observation();
  return operation.status;
}

Status HandleTable::poll(hp_handle handle) {
  std::lock_guard lock(mutex_);
  const OperationPtr& operation = find(handle);
  const Status status = status_of(*operation);
  // Who polls a send or recv may be a server that waits for others than its ranks.
  if (status.code == HP_IN_PROGRESS && !is_point_to_point(operation->signature().op)) {
    const SteadyTime now = steady_now();
    if (threads_.current().note_poll(now)) operation->waiting.noted_at = now;
  }
  return status;
}

OperationPtr HandleTable::done(hp_handle handle) const {
  std::lock_guard lock(mutex_);
  const OperationPtr& operation = find(handle);
  if (!operation->done) throw Error(HP_INVALID_ARGUMENT, "the operation is not done yet");
  note_observation();
  return operation;
}

void HandleTable::release(hp_handle handle) {
  std::lock_guard lock(mutex_);
  const OperationPtr& operation = find(handle);
  operation->waiting.released = true;
  if (!operation->done) return;
  note_observation();
  operations_.erase(handle);
}

void HandleTable::release_buffers() {
  std::lock_guard lock(mutex_);
  for (const auto& [handle, operation] : operations_) operation->buffer.reset();
}

bool HandleTable::waited_for(const Operation& operation, SteadyTime now) const {
  std::lock_guard lock(mutex_);
  const auto& waiting = operation.waiting;
  return waiting.waiters > 0 || now - waiting.left_wait_at < CallerThreads::kBetweenWaits;
}

bool HandleTable::awaited(const Operation& operation, SteadyTime now) const {
  if (waited_for(operation, now)) return true;
  std::lock_guard lock(mutex_);
  return now - operation.waiting.noted_at < CallerThreads::kBetweenWaits;
}

void HandleTable::expect_threads(std::vector<std::int64_t> ids) {
  std::lock_guard lock(mutex_);
  threads_.expect(std::move(ids));
}

void HandleTable::hold_threads(std::vector<std::int64_t> ids) {
  std::lock_guard lock(mutex_);
  threads_.hold(std::move(ids));
}

void HandleTable::note_wait(hp_handle handle, std::span<const std::int64_t> ids) {
  const SteadyTime now = steady_now();
  const std::int64_t caller = ::syscall(SYS_gettid);
  std::vector<std::pair<pid_t, SleepingThread::Look>> others;
  for (const std::int64_t id : ids) {
    const auto thread = static_cast<pid_t>(id);
    if (id != caller) others.emplace_back(thread, SleepingThread::look_at(thread));
  }
  std::lock_guard lock(mutex_);
  const OperationPtr& operation = find(handle);
  if (operation->done) return;
  operation->waiting.noted_at = now;
  if (others.size() < ids.size()) threads_.note_wait(now);
  for (const auto& [thread, look] : others) threads_.note_wait(thread, look, now);
}

int HandleTable::busy_threads(SteadyTime now, Seconds least) const {
  std::lock_guard lock(mutex_);
  return threads_.busy(now, least);
}

std::vector<CallerThreads::State> HandleTable::threads(SteadyTime now, Seconds least) const {
  std::lock_guard lock(mutex_);
  return threads_.states(now, least);
}

std::vector<std::pair<OperationPtr, IdentityPtr>> HandleTable::pending() const {
  std::lock_guard lock(mutex_);
  std::vector<std::pair<OperationPtr, IdentityPtr>> pending;
  for (const auto& [handle, operation] : operations_) {
    if (!operation->done) pending.emplace_back(operation, operation->identity);
  }
  return pending;
}

void HandleTable::rename(Operation& operation, IdentityPtr identity) {
  std::lock_guard lock(mutex_);
  operation.identity = std::move(identity);
}

HandleTable::Wait::Wait(HandleTable& table, hp_handle handle, Seconds timeout)
    : Wait(table, timeout) {
  std::lock_guard lock(table_.mutex_);
  begin_locked(table_.find(handle));
}

void HandleTable::Wait::begin_locked(const OperationPtr& operation) {
  operation_ = operation;
  ++operation_->waiting.waiters;
  again_ = operation_->waiting.left_wait_at > kLongAgo;
  thread_ = &table_.threads_.current();
  const bool is_slice = timeout_ < CallerThreads::kBetweenWaits;
  thread_->begin_wait(operation_->handle, is_slice);
}

HandleTable::Wait::~Wait() {
  if (!operation_) return;  // it was refused
  // waited_for() is asked about pending operations only.
  if (done()) {
    thread_->end_wait();
    return;
  }
  const SteadyTime now = steady_now();
  thread_->end_slice(now);
  std::lock_guard lock(table_.mutex_);
  --operation_->waiting.waiters;
  operation_->waiting.left_wait_at = now;
}

void HandleTable::Wait::sleep(Seconds timeout) {
  std::unique_lock lock(table_.mutex_);
  auto& waiting = operation_->waiting;
  const auto ended = [&] { return operation_->done.load(); };
  if (ended()) return;
  ++waiting.sleepers;
  ++table_.sleepers_;
  if (timeout == kForever) {
    waiting.ended.wait(lock, ended);
  } else {
    waiting.ended.wait_for(lock, timeout, ended);
  }
  --waiting.sleepers;
  --table_.sleepers_;
}

Status HandleTable::Wait::status() const { return table_.status_of(*operation_); }

}  // namespace horoplug
