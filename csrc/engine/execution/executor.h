// Runs the batches of one process set, one after the other, in the order of their decisions. Used
// by the thread that runs the loop.
#pragma once

#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collectives/collective.h"
#include "controller/state/rank_ranges.h"
#include "engine/operations/operation.h"
#include "trace/batch_trace.h"

namespace horoplug {

class GpuTurns;

struct Batch {
  std::uint64_t number = 0;
  std::uint32_t plan = 0;  // the epoch of its plan; 0: it was negotiated
  Tuning tuning{};         // how it runs
  OperationList operations;
  // By index in `operations`: ranks that have joined and contribute no data; or empty.
  std::vector<RankRanges> absent{};
  std::unique_ptr<BatchTrace> trace = nullptr;  // nullptr: no timeline is being written
  // Where a batch of tensors on GPUs takes turns with batches of other sets; nullptr: there were no
  // other sets when it was decided.
  GpuTurns* turns = nullptr;

  bool on_gpu() const { return !operations.empty() && operations.front()->signature().device >= 0; }

  // For messages: the first operation, and how many more there are.
  std::string describe() const;
  void end_trace() const {
    if (trace) trace->end();
  }
};

class Executor {
 public:
  // The whole life of a batch as a coroutine; see run_batch().
  using Run = std::function<Task(Comm&, Batch&)>;
  Executor(std::uint32_t set, std::unique_ptr<Comm> comm, Run run);
  ~Executor();

  void enqueue(Batch&& batch) { queue_.push_back(std::move(batch)); }
  // The plan has ended with batch `last`. Returns the batch after it, if this rank has joined it.
  std::optional<Batch> end_plan(std::uint32_t plan, std::uint64_t last);

  // Runs as far as possible without waiting. Returns the next batch that is done, if any. An
  // exception of the collective leaves it, and the executor cannot be used after that.
  std::optional<Batch> poll();

  // Whether poll() has made progress since the last call of this function.
  bool take_progress() { return std::exchange(progress_, false); }
  bool idle() const { return queue_.empty(); }
  const Batch* running() const { return running_ ? &queue_.front() : nullptr; }
  // The channel of the running batch; nullptr if no batch runs.
  const Channel* channel() const { return running_ ? &running_->channel : nullptr; }
  // The ranks of the set that the running batch waits for.
  std::vector<int> blame() const;
  // Whether the running batch waits for something that has to be polled.
  bool polled() const { return running_ && running_->fiber->polled(); }

  // Whether the running or the next batch has tensors on a GPU.
  bool next_is_on_gpu() const;
  // Whether there is a batch of tensors on GPUs that takes no turns.
  bool has_gpu_batches_without_turns() const;
  // See Comm::gpu().
  GpuGroup* gpu() const { return comm_->gpu(); }
  bool gpu_is_busy() const;

  // Takes all batches that are not done.
  std::vector<Batch> take_all();

 private:
  // The first batch of the queue runs.
  struct Running {
    Channel channel;
    std::optional<Fiber> fiber;
  };
  void start();
  Channel channel_of(std::uint32_t plan, std::uint64_t number) const;

  const std::uint32_t set_;
  std::unique_ptr<Comm> comm_;
  const Run run_;
  std::list<Batch, PoolAllocator<Batch>> queue_;
  std::optional<Running> running_;
  bool progress_ = false;
};

// Runs a batch with the cheapest algorithm, or with the one of this name wherever that can run.
// Defined in run_batch.cc.
Task run_batch(Comm& comm, Batch& batch, const char* algorithm);

}  // namespace horoplug
