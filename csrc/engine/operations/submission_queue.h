// Operations and requests on their way from the program's threads to the progress loop.
//
// The queue admits operations: it refuses what cannot run any more, gives names to operations that
// have none, refuses names that are in flight, and wakes the progress loop when a submission can
// change anything. Submissions that change nothing before others have come (see
// Negotiator::submissions_wanted) wait until a thread runs the loop anyway, or until a caller
// announces that it waits.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/operations/handle_table.h"
#include "transport/doorbell.h"

namespace horoplug {

class SubmissionQueue {
 public:
  SubmissionQueue(HandleTable& handles, Doorbell& doorbell)
      : handles_(handles), doorbell_(doorbell) {}
  SubmissionQueue(const SubmissionQueue&) = delete;
  SubmissionQueue& operator=(const SubmissionQueue&) = delete;

  // ---- called by any thread

  // Gives operations names, if they have none, and handles, and queues them: all up to the first
  // one that is refused. Returns why that one is.
  Status submit(std::span<const OperationPtr> operations);
  // The same for a caller that holds the progress loop and runs it next, until `wait` is over: it
  // wakes nobody. Throws Error if the operation is refused.
  void submit_and_run(const OperationPtr& operation, HandleTable::Wait& wait);
  // A caller waits for what has been submitted: wakes the loop if it has not seen that yet.
  void announce();
  // This rank leaves. Nothing is admitted any more.
  void request_leave(const Status& why);
  // The job is to fail, on all ranks.
  void request_abort(const std::string& reason);
  // Why nothing is admitted any more; HP_OK: operations are admitted.
  Status end() const;

  // For how long operations have been in flight so far, at least one at any time.
  Seconds active_time() const;

  // Whether the loop has to wake up for a request.
  bool requests_waiting() const { return requests_waiting_.load(); }
  // Whether there is anything that take() has not returned yet. If a thread is seen to wait, a
  // later call of this function accounts for all that the thread submitted before its wait.
  bool holds_any() const { return requests_waiting_.load() || submissions_waiting_.load(); }

  // ---- the thread that runs the loop

  struct Requests {
    std::vector<OperationPtr> operations;
    std::optional<std::string> abort_reason;
    bool leave = false;  // stays true once it is
  };
  // Whether there are requests since the last call, which `requests` then has. Before the start is
  // over, only requests to leave or abort are returned: operations wait for the start.
  bool take(bool starting, Requests& requests);
  // Wakes the loop, which has become able to take operations.
  void wake() { requests_waiting_.store(true); }
  // From here on `count` submissions are needed to change anything. Whether there are so many.
  bool set_wanted(std::size_t count);

  // Admits operations on a process set.
  void open_set(std::uint32_t set);
  // Nothing is admitted on this set any more. On the global set (0): on no set.
  void close_set(std::uint32_t set, const Status& why);
  // A rank has left: from here on only sends and recvs are admitted, on all sets.
  void end_collectives(const Status& why);
  // The process set exists no more.
  void forget_set(std::uint32_t set);
  // The job has failed. A failure replaces a shutdown of this rank that is under way.
  void fail(const Status& why);

  // Operations have ended; their names may be used again.
  void forget(std::span<const OperationPtr> operations);
  // All collective operations of this set have failed, on all ranks, except those that were
  // submitted later: the numbering of operations without a name, which may have been counted
  // differently on the ranks, begins again with `again`. Queues these before all others; they have
  // been taken from the queue before.
  void begin_again(std::uint32_t set, std::span<const OperationPtr> again);
  // Takes everything that has not been taken. The queue is closed.
  std::vector<OperationPtr> drain();

 private:
  struct SetState {
    bool joined = false;  // this rank has joined and may submit nothing before the join ends
    Status end;           // why nothing can be submitted any more
    NameSet in_flight;
  };

  void admit(const OperationPtr& operation, HandleTable::Wait* wait = nullptr);
  void count_ended(std::size_t operations);
  std::string next_name(const Operation& operation);
  bool has_enough();
  void restart_numbering_locked(std::uint32_t set);

  HandleTable& handles_;
  Doorbell& doorbell_;

  // Under the lock.
  mutable std::mutex mutex_;
  std::map<std::uint32_t, SetState> sets_;
  Status end_;
  Status end_of_collectives_;
  std::vector<OperationPtr> queue_;
  std::size_t in_flight_ = 0;  // operations of all sets
  SteadyTime active_since_;    // when the first of them was submitted
  Seconds active_time_{};      // before that
  // The number of operations without a name so far, by process set and kind.
  std::map<std::pair<std::uint32_t, OpKind>, std::uint64_t> unnamed_;
  std::uint64_t observations_seen_ = 0;
  std::uint64_t dependency_stage_ = 0;  // grows with each submission that follows an observation
  std::size_t wanted_ = 1;
  bool is_urgent_ =
      false;  // a send or recv is in the queue: it does not wait for other submissions
  bool leave_requested_ = false;
  std::optional<std::string> abort_requested_;

  // Written under the lock, and read without it.
  std::atomic<bool> requests_waiting_{false};
  std::atomic<bool> submissions_waiting_{false};

  // Used by the thread that runs the loop.
  std::size_t last_wanted_ = 1;
};

}  // namespace horoplug
