// One process set on one rank: its members, the operations that are submitted and not decided, the
// negotiator that decides about them, and the executor that runs what was decided. Used by the
// thread that runs the loop.
//
// Every part of the engine reads them, and only the functions below change them.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/running_clock.h"
#include "controller/negotiator.h"
#include "engine/execution/executor.h"

namespace horoplug {

class ProcessSet {
 public:
  using Operations = ByName<OperationPtr>;

  // `memory`: of the members on this host, if every host of the set has equally many; or nullptr.
  // `position`: in the set's own tree, with global ranks.
  ProcessSet(MembersPtr members, std::unique_ptr<HostMemory> memory, TreePosition position,
             const Negotiator::Options& options, std::unique_ptr<Comm> comm, Executor::Run run)
      : members_(std::move(members)),
        host_memory_(std::move(memory)),
        negotiator_(members_->set, std::move(position), options),
        executor_(members_->set, std::move(comm), std::move(run)) {}

  // ---- what there is to read

  std::uint32_t number() const { return members_->set; }
  const MembersPtr& members() const { return members_; }
  const Negotiator& negotiator() const { return negotiator_; }
  const Executor& executor() const { return executor_; }
  // Operations that are submitted and not decided.
  const Operations& pending() const { return pending_; }
  bool busy() const { return !pending_.empty() || !executor_.idle() || removal_; }
  const Operation* removal() const { return removal_.get(); }  // nullptr: it is not being removed
  bool shares_memory() const { return host_memory_ != nullptr; }
  bool leaving() const { return leaving_; }  // this rank leaves the job
  RunningTime last_progress() const { return last_progress_; }
  RunningTime last_event() const { return last_event_; }
  Seconds plan_patience() const { return plan_patience_; }

  // ---- operations

  // An operation was submitted. If the status is not HP_OK, nothing of its kind is accepted any
  // more. Sends and recvs are the caller's business otherwise.
  Status accept(const OperationPtr& operation, RunningTime now);

  // Messages for the negotiator; see there.
  void receive(int from, MessageKind kind, Reader& reader) {
    negotiator_.receive(from, kind, reader);
  }
  void receive(int from, const Ready& ready) { negotiator_.receive(from, ready); }
  // What the negotiator has to say. Each decision must be passed to apply(), in order.
  struct Negotiated {
    std::vector<Negotiator::Outgoing> messages;
    std::vector<Negotiator::Decision> decisions;
    std::vector<Trial> trials;
  };
  void negotiate(Negotiated& into);

  // What a decision leaves to the caller.
  struct Applied {
    OperationList ended;  // with the status of the decision
    // Of kFailAll: these did not fail with the others, and have to be submitted again.
    OperationList again;
    OperationPtr administrative;  // to be done at once; nullptr: none was decided
  };
  // `prepare` is called with a batch before it is enqueued.
  Applied apply(Negotiator::Decision& decision, RunningTime now,
                const std::function<void(Batch&)>& prepare);

  // The batch follows those that were enqueued before.
  void enqueue(Batch&& batch, RunningTime now);
  // See Executor. A batch that is done is passed to batch_done().
  std::optional<Batch> poll() { return executor_.poll(); }
  bool take_progress() { return executor_.take_progress(); }
  void batch_done(const Batch& batch, RunningTime now);

  // ---- time

  // The running batch makes progress, or none runs.
  void note_progress(RunningTime now) { last_progress_ = now; }
  // Ends the plan on all ranks, because it stands still.
  void break_plan();

  // ---- the end

  // Root only: every pending operation fails on all ranks.
  void fail_all(const Status& status) { negotiator_.fail_all(status); }
  // This rank leaves the job. Returns whether the set did not know that.
  bool leave();
  // A rank has left the job, which may be in the set or not.
  void close(int leaver) { negotiator_.close(leaver); }
  void end_transfers(const Status& status) { end_of_transfers_ = status; }
  // All ranks remove the set. Returns false if they do so already.
  bool remove(const OperationPtr& removal, RunningTime now);
  // Whether it is removed, and nothing of it runs any more.
  bool removed() const;
  OperationPtr take_removal() { return std::exchange(removal_, nullptr); }
  // All operations that have not ended, for the end of the engine.
  std::vector<OperationPtr> take_all();

 private:
  OperationList take_pending();
  OperationList take_operations(const Negotiator::Decision& decision);
  void fail_pending(Applied& applied);
  void withdraw(const Negotiator::Decision& decision);

  const MembersPtr members_;
  const std::unique_ptr<HostMemory> host_memory_;
  Negotiator negotiator_;
  Executor executor_;
  Operations pending_;
  RunningTime last_progress_;   // of the running batch; the present time if none runs
  RunningTime last_event_;      // an operation was submitted, decided or done
  Seconds plan_patience_{0.1};  // how long a plan may hold up operations that nobody waits for
  bool leaving_ = false;
  Status end_of_transfers_;  // not HP_OK: sends and recvs are not accepted any more
  OperationPtr removal_;
};

}  // namespace horoplug
