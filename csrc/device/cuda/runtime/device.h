// One GPU as one engine uses it: what all of its process sets share. What each of them has for
// itself is in workspace.h.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "base/log.h"
#include "device/cuda/driver/toolkit.h"
#include "device/cuda/runtime/context.h"

namespace horoplug::cuda {

// A point in a stream. The last one to let go of it gives the event back to be used again.
using EventPtr = std::shared_ptr<const Event>;

// For any thread. Everything throws Error.
class Device : public std::enable_shared_from_this<Device> {
 public:
  // Device `ordinal`.
  static std::shared_ptr<Device> open(std::shared_ptr<const Toolkit> toolkit, int ordinal, Log log);

  int ordinal() const { return ordinal_; }
  const Toolkit& toolkit() const { return *toolkit_; }
  const Context& context() const { return context_; }
  const Log& log() const { return log_; }
  // For whoever drives the engine, unlike the rest.
  const std::shared_ptr<LoadedKernels>& kernels() const { return kernels_; }
  // Likewise: whether all is done that was in process sets' streams when they were tracked.
  void track(CUstream stream);
  bool idle();

  // Throws HP_UNSUPPORTED if the stream is being captured into a graph: what a replay would repeat,
  // other ranks would not know of.
  void refuse_capture(CUstream stream) const;
  // Stands for all that is in the stream now.
  EventPtr mark(CUstream stream);
  // What is put into the stream from now on waits for the event; the host does not.
  void make_wait(CUstream stream, const Event& event) const;
  // Puts a copy within the GPU's memory into the stream.
  void copy(CUdeviceptr to, CUdeviceptr from, std::size_t bytes, CUstream stream) const;
  // Memory that can be used from where the one stream is now until where the other is then.
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
  std::vector<std::unique_ptr<Event>> under_way_;  // its own: an EventPtr keeps the GPU
  std::mutex mutex_;
  std::vector<std::unique_ptr<Event>> free_events_;
};

}  // namespace horoplug::cuda
