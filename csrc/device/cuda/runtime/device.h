// One GPU as one engine uses it: the state that all of its process sets share. Each set's own state
// is in workspace.h.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "base/log.h"
#include "device/cuda/driver/toolkit.h"
#include "device/cuda/runtime/context.h"

namespace horoplug::cuda {

// A position in a stream. The last owner returns the event to the pool.
using EventPtr = std::shared_ptr<const Event>;

// Usable from any thread. Every function throws Error.
class Device : public std::enable_shared_from_this<Device> {
 public:
  // Device `ordinal`.
  static std::shared_ptr<Device> open(std::shared_ptr<const Toolkit> toolkit, int ordinal, Log log);

  int ordinal() const { return ordinal_; }
  const Toolkit& toolkit() const { return *toolkit_; }
  const Context& context() const { return context_; }
  const Log& log() const { return log_; }
  // Unlike the others, for the thread that runs the progress loop.
  const std::shared_ptr<LoadedKernels>& kernels() const { return kernels_; }
  // Likewise: whether all work that was in process sets' streams when they were tracked is done.
  void track(CUstream stream);
  bool idle();

  // Throws HP_UNSUPPORTED if the stream is being captured into a graph: other ranks would not take
  // part in a replay.
  void refuse_capture(CUstream stream) const;
  // Records all work that is in the stream now.
  EventPtr mark(CUstream stream);
  // Later work in the stream waits for the event; the CPU does not wait.
  void make_wait(CUstream stream, const Event& event) const;
  // Enqueues a copy within the GPU's memory.
  void copy(CUdeviceptr to, CUdeviceptr from, std::size_t bytes, CUstream stream) const;
  // Memory that is usable from one stream's present position up to the other stream's position at
  // the release.
  CUdeviceptr allocate(std::size_t bytes, CUstream first_used_by) const;
  void release(CUdeviceptr memory, CUstream last_used_by) const;

 private:
  Device(std::shared_ptr<const Toolkit> toolkit, int ordinal, Log log);
  std::unique_ptr<Event> free_event();
  void give_back(std::unique_ptr<Event> event);

  const std::shared_ptr<const Toolkit> toolkit_;
  const int ordinal_;
  const Log log_;
  const Context context_;
  const std::shared_ptr<LoadedKernels> kernels_;
  // own events: an EventPtr would keep the GPU alive
  std::vector<std::unique_ptr<Event>> under_way_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Event>> free_events_;
};

}  // namespace horoplug::cuda
