// Runs the batches of one process set, one after the other, in the order in which they were
// decided.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collectives/collective.h"
#include "engine/operation.h"
#include "trace/batch_trace.h"

namespace horoplug {

class GpuTurns;

struct Batch {
  std::uint64_t number = 0;
  std::uint32_t plan = 0;  // epoch of the plan that it belongs to; 0: it was negotiated
  Tuning tuning{};         // how it runs
  std::vector<OperationPtr> operations;
  // By place in `operations`: ranks that have joined and take no part of their own; or empty.
  std::vector<std::vector<int>> absent{};
  std::unique_ptr<BatchTrace> trace = nullptr;  // nullptr: no timeline is being written
  // Of tensors on GPUs, where it takes turns with other sets' batches; nullptr: there are no
  // others.
  GpuTurns* turns = nullptr;

  bool on_gpu() const { return !operations.empty() && operations.front()->signature.device >= 0; }

  // For messages: the first operation, and how many more there are.
  std::string describe() const;
};

class Executor {
 public:
  // Names of algorithms to be used where they can; empty: the cheapest.
  struct Forced {
    std::string on_cpu, on_gpu;
  };
  Executor(std::uint32_t set, std::unique_ptr<Comm> comm, Forced forced);
  ~Executor();

  void enqueue(Batch batch) { queue_.push_back(std::move(batch)); }
  // The plan has ended with batch `last`. Returns the one after it, if this rank has joined that.
  std::optional<Batch> end_plan(std::uint32_t plan, std::uint64_t last);

  // Runs as far as possible without waiting. Returns the next batch that is done, if any. Throws
  // what the collective threw; the executor is of no use after that.
  std::optional<Batch> poll();

  // Whether poll() has got anywhere since the last call of this function.
  bool take_progress() { return std::exchange(progress_, false); }
  bool idle() const { return !running_ && queue_.empty(); }
  const Batch* running() const { return running_ ? &running_->batch : nullptr; }
  // The ranks of the set that the running batch waits for.
  std::vector<int> blame() const;
  // Whether it waits for something that nobody announces.
  bool polled() const { return running_ && running_->fiber->polled(); }

  // Whether what runs, or comes next, is of tensors on a GPU.
  bool next_is_on_gpu() const;
  // Whether anything is of tensors on GPUs and takes no turns.
  bool has_gpu_batches_without_turns() const;
  // See Comm::gpu().
  GpuGroup* gpu() const { return comm_->gpu(); }
  bool gpu_is_busy() const;

  // All batches that are not done, for their operations to be ended.
  std::vector<Batch> take_all();

 private:
  struct Running {
    Batch batch;
    Channel channel;
    std::unique_ptr<Fiber> fiber;
  };
  void start(Batch batch);
  Channel channel_of(std::uint32_t plan, std::uint64_t number) const;

  const std::uint32_t set_;
  std::unique_ptr<Comm> comm_;
  const Forced forced_;
  std::deque<Batch> queue_;
  std::optional<Running> running_;
  bool progress_ = false;
};

// The whole life of a batch as a coroutine; defined in run_batch.cc.
Task run_batch(Comm& comm, Batch& batch, const char* algorithm);

}  // namespace horoplug
