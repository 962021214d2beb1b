// The simulated NCCL of a process: its communicators and groups.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "tests/simulated/communicator.h"
#include "tests/simulated/simulated_nccl.h"

namespace horoplug::testing::simulated {

class NcclMachine {
 public:
  NcclMachine(const GpuInterface& gpu, SimulatedNcclOptions options);
  ~NcclMachine();
  NcclMachine(const NcclMachine&) = delete;
  NcclMachine& operator=(const NcclMachine&) = delete;

  static NcclMachine& get();
  // get() calls `make` if no machine exists; that machine lives until the process ends.
  static void set_factory(std::unique_ptr<NcclMachine> (*make)());

  const SimulatedNcclOptions options;
  cuda::NcclApi api;
  const std::shared_ptr<NcclShared> shared;

  // Returns the error that set_failure() has set for this function, or kNcclSuccess.
  ncclResult_t check_call(std::string_view function);
  void set_failure(const std::string& function, ncclResult_t result);
  void set_async_error(ncclResult_t error);
  std::size_t alive();

  std::string new_name();
  // The last error of calls without a communicator.
  void set_last_error(std::string error);
  std::string last_error();
  // Reports misuse and returns nullptr for an invalid handle.
  std::shared_ptr<Communicator> find(ncclComm_t handle);
  ncclComm_t add(std::shared_ptr<Communicator> communicator);
  // Invalidates the handle.
  std::shared_ptr<Communicator> remove(ncclComm_t handle);

  // Enqueues an operation, or adds it to the group that this thread has started.
  ncclResult_t enqueue(ncclComm_t handle, const Operation& operation, CUstream stream);
  ncclResult_t start_group();
  ncclResult_t end_group();

 private:
  struct Part {
    std::shared_ptr<Communicator> communicator;
    CUstream stream;
    std::vector<Operation> operations;
  };
  struct Group {
    int depth = 0;
    ncclResult_t result = cuda::kNcclSuccess;  // the first error
    std::vector<Part> parts;
  };
  static Group& group();
  ncclResult_t launch(Part part);

  std::mutex mutex_;
  std::map<std::string, ncclResult_t, std::less<>> failures_;
  std::map<ncclComm_t, std::shared_ptr<Communicator>> communicators_;
  std::mt19937_64 random_;
  unsigned names_ = 0;
  std::string last_error_;
};

void fill(cuda::NcclApi& api);

}  // namespace horoplug::testing::simulated
