// Handles of operations: where submitting threads and the progress thread meet.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/operation.h"

namespace horoplug {

class HandleTable {
 public:
  // Gives the operation a handle.
  void add(const OperationPtr& operation);

  // Ends an operation: waiters wake up. The status must be set in it already.
  void finish(const OperationPtr& operation);
  void finish_all(const std::vector<OperationPtr>& operations);

  // HP_OK, HP_IN_PROGRESS or how it failed; Error(HP_INVALID_ARGUMENT) for an unknown handle.
  Status poll(hp_handle handle) const;
  // The same after at most `timeout` seconds (negative: once it is done).
  Status wait(hp_handle handle, double timeout, double now);
  // An operation that is done; throws Error(HP_INVALID_ARGUMENT) otherwise.
  OperationPtr done(hp_handle handle) const;
  void release(hp_handle handle);

  // Grows whenever somebody has looked at the result of an operation that is done.
  std::uint64_t looks() const { return looks_.load(std::memory_order_relaxed); }

  // Whether a thread is blocked on this operation, counting one that comes back within a moment.
  bool waited_for(hp_handle handle, double now) const;

 private:
  struct Slot {
    OperationPtr operation;
    bool done = false;
    bool released = false;
    int waiters = 0;
    double left_wait_at = -1e9;  // a wait that timed out is usually taken up again at once
  };
  Slot& find(hp_handle handle);
  const Slot& find(hp_handle handle) const;
  Status status_of(const Slot& slot) const;
  void finish_locked(const OperationPtr& operation);

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::unordered_map<hp_handle, Slot> slots_;
  hp_handle last_handle_ = 0;
  mutable std::atomic<std::uint64_t> looks_{0};
};

}  // namespace horoplug
