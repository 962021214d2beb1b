// Handles of operations: how threads that submit operations learn that they are done. Any thread
// may call these functions.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/operations/caller_threads.h"
#include "engine/operations/operation.h"

namespace horoplug {

class HandleTable {
 public:
  class Wait;
  // Gives the operation a handle. `wait`: the calling thread begins to wait for it, and nobody else
  // learns the handle, which therefore is released, unless keep() is called.
  void add(const OperationPtr& operation, Wait* wait = nullptr);
  // Undoes the release of an operation's handle: the caller releases it later.
  void keep(const OperationPtr& operation);

  // Ends operations, whose status must be set already: wakes their waiters and calls the functions
  // that were given to on_done().
  void finish_all(std::span<const OperationPtr> operations);

  // HP_OK, HP_IN_PROGRESS or how it failed; Error(HP_INVALID_ARGUMENT) for an unknown handle.
  Status poll(hp_handle handle);
  // An operation that is done; throws Error(HP_INVALID_ARGUMENT) otherwise.
  OperationPtr done(hp_handle handle) const;
  void release(hp_handle handle);
  // Operations let go of shared buffers, which only an engine can use. All operations have ended.
  void release_buffers();
  // See hp_on_done. Returns whether the operation is in flight, so that the call comes later.
  bool on_done(hp_handle handle, hp_done done, void* context);

  // Grows whenever a caller has observed the result of an operation that is done.
  std::uint64_t result_observations() const {
    return result_observations_.load(std::memory_order_relaxed);
  }
  // A wait for one operation. The thread counts as blocked on it from construction to destruction.
  class Wait {
   public:
    // Throws Error(HP_INVALID_ARGUMENT) for an unknown handle. `timeout`: for how long the
    // caller is going to wait; a short wait may be one slice of a longer one. Negative: no limit.
    Wait(HandleTable& table, hp_handle handle, Seconds timeout = kForever);
    // Begins when the operation is added.
    Wait(HandleTable& table, Seconds timeout) : table_(table), timeout_(timeout) {}
    ~Wait();
    Wait(const Wait&) = delete;
    Wait& operator=(const Wait&) = delete;

    bool done() const { return operation_->done.load(std::memory_order_acquire); }
    // Whether the caller has waited for this operation before.
    bool again() const { return again_; }
    // Sleeps until it is done, until the timeout at the latest.
    void sleep(Seconds timeout);
    Status status() const;

   private:
    friend class HandleTable;
    void begin_locked(const OperationPtr& operation);

    HandleTable& table_;
    const Seconds timeout_;
    OperationPtr operation_;
    CallerThreads::Thread* thread_ = nullptr;
    bool again_ = false;
  };

  // Whether a thread is blocked on this operation, or was a moment ago: callers that handle signals
  // wait in slices.
  bool waited_for(const Operation& operation, SteadyTime now) const;
  // The same, or a thread waits for it outside of the core: for a future, or by polling it.
  bool awaited(const Operation& operation, SteadyTime now) const;
  // See hp_expect_threads, hp_hold_threads and hp_note_wait.
  void expect_threads(std::vector<std::int64_t> ids);
  void hold_threads(std::vector<std::int64_t> ids);
  void note_wait(hp_handle handle, std::span<const std::int64_t> ids);
  // The number of threads that may submit operations, since they do not wait; see CallerThreads.
  int busy_threads(SteadyTime now, Seconds least = {}) const;
  // What is known of the threads; see CallerThreads.
  std::vector<CallerThreads::State> threads(SteadyTime now, Seconds least) const;
  // The operations that have not ended, with their identities, which rename() may change.
  std::vector<std::pair<OperationPtr, IdentityPtr>> pending() const;
  // Gives an operation another name. Only the thread that runs the loop reads it without a lock.
  void rename(Operation& operation, IdentityPtr identity);
  // When an operation was submitted or ended for the last time; 0: never.
  SteadyTime last_event() const { return last_event_.load(std::memory_order_relaxed); }
  // Whether a thread sleeps in a Wait.
  bool has_sleepers() const { return sleepers_.load(std::memory_order_relaxed) > 0; }
  // Whether a function waits for the end of an operation in flight.
  bool has_callbacks() const { return callbacks_.load(std::memory_order_relaxed) > 0; }

 private:
  const OperationPtr& find(hp_handle handle) const;
  Status status_of(const Operation& operation) const;
  void note_observation() const { result_observations_.fetch_add(1, std::memory_order_relaxed); }

  mutable std::mutex mutex_;
  std::unordered_map<hp_handle, OperationPtr, std::hash<hp_handle>, std::equal_to<>,
                     PoolAllocator<std::pair<const hp_handle, OperationPtr>>>
      operations_;
  hp_handle last_handle_ = 0;
  CallerThreads threads_;
  mutable std::atomic<std::uint64_t> result_observations_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<int> callbacks_{0};  // functions that were given to on_done() and not called yet
  std::atomic<SteadyTime> last_event_{};
};

}  // namespace horoplug
