// A job whose ranks each have a simulated GPU and a stream of their framework on it.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "device/cuda/runtime/device.h"
#include "tests/harness/cluster.h"
#include "tests/simulated/simulated_gpu.h"
#include "tests/simulated/simulated_nccl.h"

namespace horoplug::testing {

// The framework's side of one rank: a stream on the rank's GPU, in which it writes and reads
// tensors.
class Framework {
 public:
  Framework(SimulatedGpu& gpu, int device);

  int device() const { return device_; }
  CUstream stream() const { return stream_->handle(); }
  const cuda::Context& context() const { return context_; }

  // GPU memory that is written and read in the order of the framework's stream.
  class Array {
   public:
    Array(Framework& framework, std::size_t bytes);
    void write(const std::vector<std::byte>& values);
    // Waits until the stream is idle.
    std::vector<std::byte> read() const;
    std::byte* address() const { return std::bit_cast<std::byte*>(memory_.address()); }

   private:
    Framework& framework_;
    std::size_t bytes_;
    cuda::DeviceMemory memory_;
  };

  std::vector<std::byte> read(CUdeviceptr from, std::size_t bytes) const;

 private:
  friend class Array;
  const cuda::Context context_;
  const int device_;
  std::unique_ptr<cuda::Stream> stream_;
};

struct GpuJobOptions {
  Transport transport = Transport::kThreads;
  int ranks = 2;
  EngineOptions engine = test_options();
  SimulatedOptions gpu{};  // `devices` is raised to the number of ranks
  bool has_nccl = false;
  SimulatedNcclOptions nccl{};
  std::vector<int> nccl_versions{};  // the version that each rank sees; empty: nccl.version
  // Returns a rank's MPI; null: the ranks have no MPI.
  std::function<std::shared_ptr<Mpi>(int rank)> mpi = nullptr;
  // Replace functions of the driver or of NCCL for one rank.
  std::function<void(int rank, cuda::DriverApi&)> driver = nullptr;
  std::function<void(int rank, cuda::NcclApi&)> nccl_functions = nullptr;
};

class GpuJob {
 public:
  explicit GpuJob(GpuJobOptions options = {});

  int size() const { return cluster_->size(); }
  Engine& engine(int rank) { return cluster_->engine(rank); }
  Framework& framework(int rank) { return *frameworks_[static_cast<std::size_t>(rank)]; }
  SimulatedGpu& gpu() { return *gpu_; }
  SimulatedNccl& nccl() { return *nccl_; }
  void run(const std::function<void(int rank)>& body) { cluster_->run(body); }
  void end() { cluster_.reset(); }
  // All that the engines have logged so far; its warnings.
  std::string logged();
  std::string warnings();

  // Runs an operation on a rank's GPU and returns its result. The input is written and the result
  // is read in the framework's stream.
  std::vector<std::byte> perform(int rank, Order order, const std::vector<std::byte>& input,
                                 bool in_place = false);

 private:
  std::unique_ptr<SimulatedGpu> gpu_;
  std::unique_ptr<SimulatedNccl> nccl_;
  std::vector<std::unique_ptr<Framework>> frameworks_;
  std::mutex log_mutex_;
  std::string log_, warnings_;
  std::unique_ptr<Cluster> cluster_;
};

}  // namespace horoplug::testing
