// A job whose ranks have a simulated GPU each, and a framework's stream there.
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

// What a framework has on one rank's GPU: a stream in which tensors are written and read.
class Framework {
 public:
  Framework(SimulatedGpu& gpu, int device);

  int device() const { return device_; }
  CUstream stream() const { return stream_->handle(); }
  const cuda::Context& context() const { return context_; }

  // Memory that is written in the order of the stream.
  class Array {
   public:
    Array(Framework& framework, std::size_t bytes);
    void write(const std::vector<std::byte>& values);
    // Waits for the stream.
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
  SimulatedOptions gpu{};  // as many devices as ranks, unless it says more
  bool has_nccl = false;
  SimulatedNcclOptions nccl{};
  std::vector<int> nccl_versions{};  // by rank, as the ranks see them; empty: what it is
  // A rank's MPI, if there is any.
  std::function<std::shared_ptr<Mpi>(int rank)> mpi = nullptr;
  // Changes the driver's functions, or NCCL's, for one rank.
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
  // What the engines have logged so far.
  std::string logged();
  std::string warnings();

  // The operation on a rank's GPU, as a program for one process does it: its input is written in
  // the framework's stream, and the result read there. In place if `in_place`.
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
