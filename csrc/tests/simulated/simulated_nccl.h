// NCCL over simulated GPUs: ranks are threads, or processes that share a folder.
//
// An operation runs in its stream once all ranks have enqueued it; a missing rank blocks the stream
// until ncclCommAbort. As in NCCL, a non-blocking communicator is in progress until all ranks have
// joined, and sometimes after a call of an operation, which is not in the stream until then: a
// caller that does not wait for the state ncclSuccess gets wrong results. Different operations on
// the ranks, and invalid communicators, end the process with a message; see
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
  int version = 23003;          // NCCL_MULTI_RANK_GPU_ENABLE has an effect since 23000
  bool multi_rank_gpu = false;  // the same as NCCL_MULTI_RANK_GPU_ENABLE=1
  unsigned seed = testing::seed();
  int late = 4;  // on average, one in `late` non-blocking calls returns ncclInProgress; 0: none
  std::string folder = {};  // see SimulatedOptions
};

class SimulatedNccl {
 public:
  // At most one exists in a process. The GPU must outlive it.
  explicit SimulatedNccl(SimulatedGpu& gpu, SimulatedNcclOptions options = {});
  SimulatedNccl(const simulated::GpuInterface& gpu, SimulatedNcclOptions options);
  // Aborts all communicators.
  ~SimulatedNccl();
  SimulatedNccl(const SimulatedNccl&) = delete;
  SimulatedNccl& operator=(const SimulatedNccl&) = delete;

  const cuda::NcclApi& api() const;

  // Makes all further calls of a function fail: fail("ncclAllReduce", 1).
  void fail(const std::string& function, ncclResult_t result);
  // Sets the asynchronous error of all communicators, as after the loss of a connection. Operations
  // under way continue or keep waiting.
  void set_async_error(ncclResult_t error = 6);
  // The number of communicators that were neither destroyed nor aborted.
  std::size_t alive() const;

 private:
  std::unique_ptr<simulated::NcclMachine> machine_;
};

}  // namespace horoplug::testing
