// Simulated GPUs, for tests of the whole engine on machines without GPUs: streams are threads,
// device memory is host memory, and host_grid runs the kernels.
//
// A stream runs its work in order, after random delays. A missing event wait therefore shows as
// wrong results, and as a data race under ThreadSanitizer. Misuse of CUDA ends the process with a
// message: memory that is freed twice or while it is in use, handles that are invalid or belong to
// another device, calls without a context, waits that do not end.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "device/cuda/driver/driver.h"
#include "tests/harness/random_elements.h"

namespace horoplug::testing {

namespace simulated {
class Machine;
}

struct SimulatedOptions {
  int devices = 1;                 // at most 8
  bool one_gpu = false;            // all devices have the UUID of device 0
  bool ipc_events = true;          // the value of kIpcEventSupported
  std::size_t memory = 1UL << 30;  // of each device, in bytes
  int capability = 90;             // the compute capability: 90 is 9.0
  int driver_version = 12040;
  unsigned seed = testing::seed();  // for random delays
  std::chrono::microseconds longest_delay{50};
  std::chrono::seconds wait_timeout{30};  // a host wait that takes longer is reported as misuse
  // Processes with the same folder can share memory and events; empty: no process can.
  std::string folder = {};
};

class SimulatedGpu {
 public:
  // At most one exists in a process, because the driver functions have no argument to find it by.
  explicit SimulatedGpu(SimulatedOptions options = {});
  // Discards the work that streams have not started.
  ~SimulatedGpu();
  SimulatedGpu(const SimulatedGpu&) = delete;
  SimulatedGpu& operator=(const SimulatedGpu&) = delete;

  const cuda::DriverApi& api() const;

  // The module image of a kernel, as an ImageSource (device/cuda/jit/kernel_code.h).
  static std::shared_ptr<const std::string> code(const std::string& kernel, int capability);
  // The same as a string. The module of the kernel "" has all kernels.
  static std::string image(const std::string& kernel);

  // Makes all further calls of a function fail: fail("cuMemAlloc", 2). kSuccess ends this.
  void fail(const std::string& function, CUresult result);
  // As if the GPU had fallen off the bus: streams discard their work, and all further calls return
  // `result`.
  void lose_device(CUresult result = 999);
  // Streams start no further work between pause() and resume(), so that what is enqueued meanwhile
  // is certainly pending.
  void pause();
  void resume();
  // Sets the result of cuStreamIsCapturing; 1: a graph capture is active.
  void set_capture_status(CUstream stream, CUstreamCaptureStatus status);

  // `handler` is called on misuse instead of ending the process; the misusing call returns an
  // error.
  void on_misuse(std::function<void(const std::string&)> handler);

  // The number of objects that were created and not destroyed: allocations, streams, events,
  // modules and retained contexts.
  std::size_t alive() const;
  std::size_t bytes_used(int device) const;
  // The number of contexts that were pushed and not popped.
  int pushed() const;
  // The number of calls in which the host waits for a stream: synchronisation, cuMemFree, and
  // copies into memory that is not pinned.
  std::size_t host_waits() const;
  // How often work of this name was enqueued: "copy_32" for a kernel, "copy to the GPU".
  std::size_t count(const std::string& what) const;

  simulated::Machine& machine() { return *machine_; }

 private:
  std::unique_ptr<simulated::Machine> machine_;
};

}  // namespace horoplug::testing
