// One rank: takes submissions, agrees with its peers on what runs next, runs it and
// reports its completion.
//
// The engine composes parts, each of which owns its state and can be used without an engine:
//
//   SubmissionQueue      admits operations and hands them to the progress loop
//   ProgressLoop         decides which thread does the work below, and when it sleeps
//   Scheduler            takes operations through negotiation and execution to their completion
//   PointToPoint         matches and transfers what two ranks send each other
//   ProcessSetRegistry   creates, finds and removes process sets; SharedBuffers does buffers
//   RankGpu             keeps the order of operations on this rank's GPU
//   OnDemandConnections  asks for connections that are made while the engine runs
//   MessageDispatcher    takes control messages to the parts; Handshake is the first exchange
//   Watchdog             checks everything that may take too long
//   Shutdown, Completion end the engine and single operations
//
// Threads: the program's threads call the public functions. They share HandleTable,
// SubmissionQueue, Lifecycle, and the parts of ProcessSetRegistry, SharedBuffers and RankGpu that
// say so, each with its own lock; no thread holds two of these locks at once, except that
// SubmissionQueue takes the lock of HandleTable. Everything else is used only by the thread that
// holds the progress loop.
//
// An engine uses no global state: one process can have several.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/completion.h"
#include "engine/counters.h"
#include "engine/handshake.h"
#include "engine/lifecycle.h"
#include "engine/loop/progress_loop.h"
#include "engine/message_dispatcher.h"
#include "engine/on_demand_connections.h"
#include "engine/operations/handle_table.h"
#include "engine/operations/submission_queue.h"
#include "engine/options.h"
#include "engine/peers.h"
#include "engine/point_to_point.h"
#include "engine/polling.h"
#include "engine/process_set_registry.h"
#include "engine/rank_gpu.h"
#include "engine/scheduler.h"
#include "engine/segment_allocator.h"
#include "engine/shared_buffers.h"
#include "engine/shutdown.h"
#include "engine/tracing.h"
#include "engine/tuning_log.h"
#include "engine/watchdog/watchdog.h"
#include "transport/mesh.h"

namespace horoplug {

class Engine {
 public:
  // Starts the progress thread. wait_until_ready() waits for the end of the start. The table of
  // handles may outlive the engine: an operation that has ended keeps its status and its results.
  explicit Engine(EngineConfig config,
                  std::shared_ptr<HandleTable> handles = std::make_shared<HandleTable>());
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Returns when every peer has introduced itself and agrees on the settings; throws Error
  // otherwise.
  void wait_until_ready();

  // The ranks of a process set. Both throw Error(HP_INVALID_ARGUMENT) if it does not exist, and
  // members() also if this rank is not in it.
  MembersPtr any_members(std::uint32_t set) const;
  MembersPtr members(std::uint32_t set) const;
  // Queues an operation (see make_operation) and gives it a name, if it has none, and a handle.
  // Throws Error if it is refused.
  hp_handle submit(OperationPtr operation);
  // The same for several operations, up to the first one that is refused: the status says why.
  // Operations that have a handle are submitted.
  Status submit_all(const std::vector<OperationPtr>& operations);
  // Operations on process sets; see hp_process_set_add, hp_process_set_remove and hp_join.
  hp_handle add_set(const std::vector<int>& ranks);
  hp_handle remove_set(std::uint32_t set);
  hp_handle join(std::uint32_t set);
  // See hp_buffer_create.
  hp_handle create_buffer(std::uint64_t bytes);
  HandleTable& handles() { return handles_; }
  // This rank's GPU; see RankGpu::device().
  std::shared_ptr<cuda::Device> device(int ordinal) { return gpu_.device(ordinal); }
  // HP_OK, HP_IN_PROGRESS if the timeout has passed first, or how the operation failed. Runs the
  // progress loop meanwhile, unless another thread does.
  Status wait(hp_handle handle, Seconds timeout);
  Status poll(hp_handle handle);
  // See hp_on_done.
  void on_done(hp_handle handle, hp_done done, void* context);
  // submit() and wait() in the calling thread, if no other thread runs the progress loop. The
  // handle is released, unless the caller keeps it: HandleTable::keep().
  Status perform(const OperationPtr& operation, Seconds timeout);

  // Leaves in agreement with the peers. Returns when the engine has stopped.
  void shutdown();
  // Fails the job on all ranks.
  void abort(const std::string& reason);

  // See hp_engine_set_limits.
  void set_limits(Seconds data_timeout, Seconds operation_timeout) {
    config_.options.data_timeout = data_timeout;
    config_.options.operation_timeout = operation_timeout;
  }

  // See hp_connection_add and hp_connection_fail.
  void add_connection(int rank, std::vector<std::unique_ptr<Stream>> lanes);
  void fail_connection(int rank, const std::string& reason);

  // See hp_engine_attach.
  void attach(Engine& group, const std::string& name, std::vector<int> ranks);

  int size() const { return config_.size(); }
  hp_stats stats() const;
  Tracing& tracing() { return tracing_; }

 private:
  void check_peer(int rank) const;
  void prepare(std::span<const OperationPtr> operations);
  void start_running(std::vector<Segment> segments);
  bool take_requests();

  // The work of the progress loop; see ProgressLoop.
  friend class ProgressLoop<Engine>;
  bool step();
  bool expects_messages() const;
  void watch() { watchdog_.watch(clock_.now()); }
  void fail(const Status& status) { shutdown_.fail(status); }
  bool stopped() const { return lifecycle_.stopped(); }
  bool requests_waiting() const { return submissions_.requests_waiting() || on_demand_.waiting(); }
  bool has_running_batch() const;
  bool has_sleeping_callers() const { return handles_.has_sleepers(); }
  bool has_callbacks() const { return handles_.has_callbacks(); }
  bool must_poll() const { return polling_.needed(); }
  SteadyTime quiet_since() const { return activity_.quiet_since; }
  Seconds sleep_time();
  Seconds watch_interval() const { return watchdog_.interval(); }

  EngineConfig config_;  // changed by the handshake only, but for the limits that can be set

  // Used by any thread.
  Tracing tracing_;
  const std::shared_ptr<HandleTable> handle_table_;
  HandleTable& handles_;
  Counters counters_;
  Lifecycle lifecycle_;
  const std::shared_ptr<Doorbell> doorbell_;
  SubmissionQueue submissions_;

  // Used by the thread that runs the loop.
  SubmissionQueue::Requests requests_;  // those that were taken last: their memory is used again
  TuningLog tuning_log_;
  Activity activity_;
  RunningClock clock_;
  Mesh mesh_;
  OnDemandConnections on_demand_;  // partly by any thread
  PointToPoint point_to_point_;
  SegmentAllocator segments_;
  Completion completion_;
  ProcessSetRegistry registry_;  // partly by any thread
  SharedBuffers buffers_;        // partly by any thread
  RankGpu gpu_;                  // partly by any thread
  Polling polling_;
  Peers peers_;
  Handshake handshake_;
  Suspicion suspicion_;
  StallInspector stalls_;
  TransferDeadlines transfers_;
  PlanDeadlines plans_;
  PeerWakeUps wakeups_;
  Watchdog watchdog_;
  Scheduler scheduler_;
  Shutdown shutdown_;
  MessageDispatcher dispatcher_;

  ProgressLoop<Engine> loop_;
};

}  // namespace horoplug
