// NCCL over simulated GPUs: ranks are threads, or processes that share a folder.
//
// An operation is done in the stream that it was put into when all ranks have put theirs into one;
// a rank that does not come blocks that stream until ncclCommAbort. As NCCL, a communicator that
// does not block is in progress until all ranks have come, and sometimes after operations, which
// are in no stream until then: who does not ask for its state in time gets wrong numbers. Ranks
// that do not do the same, and communicators that are gone, end the process with a message: see
// SimulatedGpu::on_misuse.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "device/cuda/driver/nccl.h"
#include "tests/harness/random_elements.h"
#include "tests/simulated/simulated_gpu.h"

namespace horoplug::testing {

namespace simulated {
struct GpuInterface;
class NcclMachine;
}  // namespace simulated

struct SimulatedNcclOptions {
  int version = 23003;          // from 23000 on, NCCL knows NCCL_MULTI_RANK_GPU_ENABLE
  bool multi_rank_gpu = false;  // as if that were set to 1, which counts, too
  unsigned seed = testing::seed();
  int late = 4;  // how seldom an operation is in progress when the call returns; 0: never
  std::string folder = {};  // as SimulatedOptions has it
};

class SimulatedNccl {
 public:
  // One at a time in a process. The GPU outlives it.
  explicit SimulatedNccl(SimulatedGpu& gpu, SimulatedNcclOptions options = {});
  SimulatedNccl(const simulated::GpuInterface& gpu, SimulatedNcclOptions options);
  // Aborts all communicators.
  ~SimulatedNccl();
  SimulatedNccl(const SimulatedNccl&) = delete;
  SimulatedNccl& operator=(const SimulatedNccl&) = delete;

  const cuda::NcclApi& api() const;

  // Lets all calls of a function fail from now on: fail("ncclAllReduce", 1).
  void fail(const std::string& function, ncclResult_t result);
  // What communicators say of their state from now on, as after the loss of a connection. What is
  // under way goes on, or waits.
  void set_async_error(ncclResult_t error = 6);
  // Communicators that were made, and not destroyed or aborted.
  std::size_t alive() const;

 private:
  std::unique_ptr<simulated::NcclMachine> machine_;
};

}  // namespace horoplug::testing
