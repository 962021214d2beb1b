#include "engine/handle_table.h"

#include <chrono>

namespace horoplug {
namespace {

// Callers that look at signals wait in slices; between two of them they still count as blocked.
constexpr double kBetweenWaits = 1.0;

}  // namespace

void HandleTable::add(const OperationPtr& operation) {
  std::lock_guard lock(mutex_);
  operation->handle = ++last_handle_;
  slots_[operation->handle].operation = operation;
}

void HandleTable::finish_locked(const OperationPtr& operation) {
  const auto found = slots_.find(operation->handle);
  if (found == slots_.end()) return;
  if (found->second.released) {
    slots_.erase(found);
  } else {
    found->second.done = true;
  }
}

void HandleTable::finish(const OperationPtr& operation) { finish_all({operation}); }

void HandleTable::finish_all(const std::vector<OperationPtr>& operations) {
  if (operations.empty()) return;
  {
    std::lock_guard lock(mutex_);
    for (const OperationPtr& operation : operations) finish_locked(operation);
  }
  changed_.notify_all();
}

HandleTable::Slot& HandleTable::find(hp_handle handle) {
  const auto found = slots_.find(handle);
  if (found == slots_.end() || found->second.released) {
    throw Error(HP_INVALID_ARGUMENT, "unknown handle " + std::to_string(handle));
  }
  return found->second;
}

const HandleTable::Slot& HandleTable::find(hp_handle handle) const {
  return const_cast<HandleTable*>(this)->find(handle);
}

Status HandleTable::status_of(const Slot& slot) const {
  if (slot.done) looks_.fetch_add(1, std::memory_order_relaxed);
  return slot.done ? slot.operation->status : Status{HP_IN_PROGRESS, "not done yet"};
}

Status HandleTable::poll(hp_handle handle) const {
  std::lock_guard lock(mutex_);
  return status_of(find(handle));
}

Status HandleTable::wait(hp_handle handle, double timeout, double now) {
  std::unique_lock lock(mutex_);
  Slot& slot = find(handle);  // references into the map stay valid while others come and go
  if (slot.done) return status_of(slot);
  ++slot.waiters;
  const auto done = [&] { return slot.done; };
  if (timeout < 0) {
    changed_.wait(lock, done);
  } else {
    changed_.wait_for(lock, std::chrono::duration<double>(timeout), done);
  }
  --slot.waiters;
  slot.left_wait_at = now + (timeout < 0 ? 0 : timeout);
  return status_of(slot);
}

OperationPtr HandleTable::done(hp_handle handle) const {
  std::lock_guard lock(mutex_);
  const Slot& slot = find(handle);
  if (!slot.done) throw Error(HP_INVALID_ARGUMENT, "the operation is not done yet");
  return slot.operation;
}

void HandleTable::release(hp_handle handle) {
  std::lock_guard lock(mutex_);
  Slot& slot = find(handle);
  if (slot.done) {
    looks_.fetch_add(1, std::memory_order_relaxed);
    slots_.erase(handle);
  } else {
    slot.released = true;
  }
}

bool HandleTable::waited_for(hp_handle handle, double now) const {
  std::lock_guard lock(mutex_);
  const auto found = slots_.find(handle);
  if (found == slots_.end()) return false;
  return found->second.waiters > 0 || now - found->second.left_wait_at < kBetweenWaits;
}

}  // namespace horoplug
