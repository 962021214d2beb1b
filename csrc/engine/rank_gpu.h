// This rank's GPU: the order of operations on it, from the streams of the framework to the end.
//
// A batch itself is run by run_batch.cc and the algorithms; a set's part of the GPU is a GpuGroup.
#pragma once

#include <memory>
#include <mutex>
#include <span>

#include "base/log.h"
#include "collectives/gpu/gpu_turns.h"
#include "engine/operations/operation.h"
#include "engine/options.h"
#include "engine/process_set_registry.h"
#include "transport/mesh.h"

namespace horoplug {

class RankGpu {
 public:
  RankGpu(const EngineConfig& config, ProcessSetRegistry& registry, Mesh& mesh)
      : config_(config), registry_(registry), mesh_(mesh) {}

  // ---- called by any thread

  // The rank has one GPU, from the first use on. -1: that one, or the one that fits the rank's
  // number on its host.
  std::shared_ptr<cuda::Device> device(int ordinal);
  // Records in the framework's streams when the tensors of these operations can be read.
  void mark_ready(std::span<const OperationPtr> operations);
  // A stream waits for the results of an operation that is done; see hp_stream_wait.
  static void make_stream_wait(const Operation& operation, CUstream stream);
  // See hp_stream_copy.
  static void copy_result(const Operation& operation, int index, void* to, CUstream stream);

  // ---- the thread that runs the loop

  // Batches of different sets take turns on the GPU; nullptr while there is only the global set.
  GpuTurns* turns() { return registry_.last_number() > 0 ? &turns_ : nullptr; }
  // Whether the GPU may still be running a batch.
  bool is_busy() const;
  // Whether a batch still waits on the GPU for work that the framework enqueued before it.
  bool waits_for_framework() const;
  // Whether a set may begin work on the GPU. Before that, all messages to other ranks are sent.
  bool may_start(std::uint32_t set);
  // Whether no other rank uses resources of this rank's GPU any more; see GpuGroup::over().
  bool is_over() const;
  // Ends all work on the GPU, after the job has failed.
  void abort();

 private:
  const EngineConfig& config_;
  ProcessSetRegistry& registry_;
  Mesh& mesh_;

  // Under the lock.
  std::mutex mutex_;
  std::shared_ptr<cuda::Device> device_;  // once it has been used

  // Used by the thread that runs the loop.
  GpuTurns turns_;
};

}  // namespace horoplug
