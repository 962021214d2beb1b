// GPUs that are simulated, for tests of the whole engine without one: streams are threads, a
// GPU's memory is the host's, and kernels are run by host_grid.
//
// What is put into a stream is done in its order and, after random delays, at no particular time: a
// wait for an event that is missing shows as wrong numbers, and as a data race under
// ThreadSanitizer. Misuse of CUDA ends the process with a message: memory freed twice or in use,
// handles that are not known or of another device, calls without a context, waits without an end.
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
  bool one_gpu = false;            // all have the UUID of the first
  bool ipc_events = true;          // as kIpcEventSupported
  std::size_t memory = 1UL << 30;  // bytes, of each
  int capability = 90;             // 90 is 9.0
  int driver_version = 12040;
  unsigned seed = testing::seed();  // of delays
  std::chrono::microseconds longest_delay{50};
  std::chrono::seconds wait_timeout{30};  // after which a wait of the host is one without an end
  // That processes have in common which share memory and events; empty: none do.
  std::string folder = {};
};

class SimulatedGpu {
 public:
  // One at a time in a process: the functions of the table find it by that.
  explicit SimulatedGpu(SimulatedOptions options = {});
  // Throws away what streams have not done.
  ~SimulatedGpu();
  SimulatedGpu(const SimulatedGpu&) = delete;
  SimulatedGpu& operator=(const SimulatedGpu&) = delete;

  const cuda::DriverApi& api() const;

  // The code of a kernel, as an ImageSource (device/cuda/jit/kernel_code.h).
  static std::shared_ptr<const std::string> code(const std::string& kernel, int capability);
  // The same as text. That of the kernel "" is of all kernels.
  static std::string image(const std::string& kernel);

  // Lets all calls of a function fail from now on: fail("cuMemAlloc", 2); with kSuccess, no longer.
  void fail(const std::string& function, CUresult result);
  // The GPU falls off: nothing more is done, and all calls return this from now on.
  void lose_device(CUresult result = 999);
  // Streams begin nothing more, until they are let go: what is put into them then is under way for
  // sure.
  void pause();
  void resume();
  // As if the stream were being captured into a graph: 1 is active.
  void set_capture_status(CUstream stream, CUstreamCaptureStatus status);

  // Told of misuse instead of the end of the process; the call returns an error then.
  void on_misuse(std::function<void(const std::string&)> handler);

  // What was made and not given back: memory, streams, events, modules, contexts retained.
  std::size_t alive() const;
  std::size_t bytes_used(int device) const;
  // Contexts that are pushed and not popped.
  int pushed() const;
  // Calls in which the host waited for a stream: synchronisation, cuMemFree with something still to
  // do, copies into memory that is not pinned.
  std::size_t host_waits() const;
  // What streams have been told to do: "kernel copy_32", "copy to the GPU".
  std::size_t count(const std::string& what) const;

  simulated::Machine& machine() { return *machine_; }

 private:
  std::unique_ptr<simulated::Machine> machine_;
};

}  // namespace horoplug::testing
