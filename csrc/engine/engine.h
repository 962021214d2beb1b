// One rank: takes submissions, agrees with its peers on what runs next, runs it and tells when it
// is done.
//
// One thread at a time does all the work, and is said to drive the engine: a thread that waits for
// an operation, or, when none does, the engine's progress thread, which sleeps when there is no
// work. Other threads only put submissions into a queue and wait for handles. An engine knows
// nothing outside itself: several of them can live in one process.
#pragma once

#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_set>
#include <vector>

#include "base/log.h"
#include "collectives/gpu/gpu_turns.h"
#include "controller/stall_inspection.h"
#include "engine/handle_table.h"
#include "engine/options.h"
#include "engine/process_set.h"
#include "engine/progress_loop.h"
#include "engine/tracing.h"
#include "engine/tuning_log.h"
#include "engine/watchdog/liveness.h"
#include "transport/mesh.h"

namespace horoplug {

class Engine {
 public:
  // Starts the progress thread; wait_until_ready() ends the start.
  explicit Engine(EngineConfig config);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Returns when every peer has introduced itself and agrees on the settings; throws Error
  // otherwise.
  void wait_until_ready();

  // The ranks of a process set that exists, and that this rank is in; Error(HP_INVALID_ARGUMENT)
  // otherwise.
  MembersPtr any_members(std::uint32_t set) const;
  MembersPtr members(std::uint32_t set) const;
  // Queues an operation (see make_operation) and gives it a name, if it has none, and a handle.
  hp_handle submit(OperationPtr operation);
  // The same for several, up to the first one that is refused: the status says why. What has got a
  // handle is submitted.
  Status submit_all(const std::vector<OperationPtr>& operations);
  // The same for operations on process sets; see hp_process_set_add, hp_process_set_remove and
  // hp_join.
  hp_handle add_set(const std::vector<int>& ranks);
  hp_handle remove_set(std::uint32_t set);
  hp_handle join(std::uint32_t set);
  // And on buffers (buffers.cc); see hp_buffer_create.
  hp_handle create_buffer(std::uint64_t bytes);
  HandleTable& handles() { return handles_; }
  // This rank's GPU (gpu.cc). From the first use on there is one; -1: that one, or the one that
  // fits the rank's number on its host.
  std::shared_ptr<cuda::Device> device(int ordinal);
  // See hp_stream_wait.
  void make_stream_wait(hp_handle handle, CUstream stream);
  // See hp_stream_copy.
  void copy_result(hp_handle handle, int index, void* to, CUstream stream);
  // HP_OK, HP_IN_PROGRESS if `timeout` seconds (negative: any number) have passed first, or how the
  // operation failed. Does the engine's work meanwhile, unless another thread does.
  Status wait(hp_handle handle, double timeout);
  Status poll(hp_handle handle);
  // See hp_on_done.
  void on_done(hp_handle handle, hp_done done, void* context);
  // submit() and wait() without a detour over the progress thread.
  Status perform(const OperationPtr& operation, double timeout);

  // Leaves in good order; returns when the progress thread has ended.
  void shutdown();
  // Fails on purpose, everywhere.
  void abort(const std::string& reason);

  int size() const { return config_.size(); }
  hp_stats stats() const;
  Tracing& tracing() { return tracing_; }

 private:
  enum class State { kStarting, kRunning, kLeaving, kStopped };

  void admit(const OperationPtr& operation);
  bool queue_submissions();
  bool set_submissions_wanted();
  void announce();

  // What the progress loop needs of its work (see ProgressLoop).
  friend class ProgressLoop<Engine>;
  bool stopped() const { return state_ == State::kStopped; }
  bool requests_waiting() const { return requests_waiting_.load(); }
  bool has_running_batch() const;
  bool has_sleeping_callers() const { return handles_.has_sleepers(); }
  bool must_poll() const;
  double poll_interval() const;
  double quiet_since() const { return quiet_since_; }
  double watch_interval() const;
  double sleep_seconds() const;

  // The thread that runs the loop.
  bool step();
  bool take_requests();
  void submit_here(const OperationPtr& operation);
  bool negotiate();
  bool apply(ProcessSet& set, Negotiator::Decision& decision);
  bool execute();
  bool advance_leaving();
  void check_links();

  // Process sets (sets.cc).
  void make_set(const MembersPtr& members, std::vector<Segment> segments);
  void create_set(std::vector<int> ranks);
  void administer(ProcessSet& set, const OperationPtr& operation);
  bool finish_removals();
  bool forget_removed();
  ProcessSet* set_of_message(std::uint32_t number, int from, std::span<const std::byte> message);

  // Shared buffers (buffers.cc).
  std::shared_ptr<SharedBuffer> buffer_of(const Operation& operation);
  std::size_t reserve(int rank, std::size_t bytes);
  void add_buffer(const OperationPtr& operation);

  // Tensors on GPUs (gpu.cc).
  void mark_ready(std::span<const OperationPtr> operations);
  bool gpu_is_busy() const;
  bool gpu_has_not_begun() const;
  bool may_turn_to_gpu(std::uint32_t set);
  bool gpus_are_over();
  void abort_gpus();

  // Messages and the start (handshake.cc).
  void receive(int from, Bytes message);
  void dispatch(int from, std::span<const std::byte> message);
  void dispatch_safely(int from, std::span<const std::byte> message);
  void begin_handshake();
  void receive_hello(int from, const Hello& hello);
  void finish_handshake();

  // Things that take too long (watch.cc).
  void watch();
  void watch_handshake() const;
  bool watch_transfers();
  bool watch_gpus();
  void check_liveness(bool late);
  std::string who_is_silent(std::vector<int> ranks) const;
  std::string whom_it_waits_for(const ProcessSet& set) const;
  void nudge();
  void watch_plans();
  double plan_patience(const ProcessSet& set) const;
  void watch_pending();
  void run_inspection();
  void judge(const Report& report);
  bool inspection_is_late() const;
  void judge_silence();
  RankReport report_of_this_rank() const;
  double waiting_since(const Operation& operation) const;
  double oldest_wait() const;
  double inspection_interval() const;
  double overdue_time() const;

  // Endings (endings.cc).
  void fail(const Status& status);
  void end_everything();
  void end_operations(std::vector<OperationPtr> operations, const Status& status);
  std::vector<OperationPtr> take_pending(ProcessSet& set);
  void close_for_submissions(std::uint32_t set, const Status& status);
  void stop();

  EngineConfig config_;
  const Log log_;
  Tracing tracing_;
  TuningLog tuning_log_;
  HandleTable handles_;

  // The GPU of this rank's tensors, once it has had one.
  std::mutex device_mutex_;
  std::shared_ptr<cuda::Device> device_;

  // Used by the thread that runs the loop.
  GpuTurns gpu_turns_;

  // Shared with submitting threads.
  struct KnownSet {
    MembersPtr members;
    bool joined = false;  // this rank may submit nothing to it for now
    Status end;           // nor anything any more
  };
  mutable std::mutex mutex_;
  std::map<std::uint32_t, KnownSet> known_sets_;
  std::condition_variable state_changed_;
  State state_ = State::kStarting;
  Status end_status_;  // why nothing can be submitted any more
  std::vector<OperationPtr> submissions_;
  std::unordered_set<std::string> in_flight_;  // keys of operations, for duplicates
  std::uint64_t observations_seen_ = 0;
  std::uint64_t dependency_epoch_ = 0;
  // Operations without a name so far, by set and kind.
  std::map<std::pair<std::uint32_t, OpKind>, std::uint64_t> unnamed_;
  std::map<const std::byte*, std::weak_ptr<SharedBuffer>> buffers_;  // by where they begin
  bool leave_requested_ = false;
  std::optional<std::string> abort_requested_;
  // There is something that the engine has to be woken for. Submissions that cannot change anything
  // before others come (see Negotiator::submissions_wanted) wait until somebody is awake anyway.
  std::atomic<bool> requests_waiting_{false};
  std::atomic<bool> submissions_waiting_{false};
  std::size_t submissions_wanted_ = 1;  // under the lock

  // Used by the thread that runs the loop.
  std::shared_ptr<Doorbell> doorbell_;
  std::unique_ptr<Mesh> mesh_;
  std::map<std::uint32_t, std::unique_ptr<ProcessSet>> sets_;  // those that this rank is in
  std::vector<std::unique_ptr<ProcessSet>> removed_sets_;      // with something on the GPU
  std::uint32_t last_set_ = 0;
  std::uint32_t last_buffer_ = 0;
  std::vector<std::size_t> segment_ends_;  // by rank: what is in use of its segment, in bytes
  std::map<std::uint32_t, std::vector<std::pair<int, Bytes>>> early_set_messages_;
  std::unique_ptr<StallInspection> stall_inspection_;
  std::vector<std::optional<Hello>> hellos_;
  std::vector<std::pair<int, Bytes>>
      early_messages_;  // from peers that were ready before this rank
  std::vector<bool> departed_;
  LivenessCheck liveness_;  // while a transfer stands still
  bool leaving_ = false;
  bool gpus_leave_ = false;
  bool said_bye_ = false;
  double leaving_since_ = 0;
  double started_at_ = 0;
  double last_event_ = 0;  // something was submitted, decided or done
  double last_watch_ = 0;
  double next_inspection_ = 0;
  double inspection_begun_ = 0;
  double last_silence_warning_ = -1e9;
  bool inspection_requested_ = false;
  // A batch has last got on, or data come over a connection that is polled.
  double quiet_since_ = 0;
  double nudged_at_ = 0;
  std::size_t nudges_ = 0;
  std::uint64_t last_data_moved_ = 0;
  std::size_t last_wanted_ = 1;
  std::map<std::pair<std::uint32_t, std::string>, double> stall_warned_;

  struct Counters {
    std::atomic<std::uint64_t> batches{0}, tensors{0}, bytes{0}, control_messages{0},
        control_bytes{0}, cached_names{0}, planned_batches{0}, broken_plans{0}, failed{0};
  };
  Counters counters_;
  std::unique_ptr<ProgressLoop<Engine>> loop_;
};

}  // namespace horoplug
