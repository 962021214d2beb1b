// One NCCL communicator of a process set's ranks.
//
// It is nonblocking: a call that waits for other ranks continues by itself, and settled() tells
// when the next call may be made. Enqueued work runs when the other ranks have enqueued theirs in
// the same order.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>

#include "base/types.h"
#include "device/cuda/driver/nccl.h"
#include "device/cuda/runtime/device.h"

namespace horoplug::cuda {

// NCCL's type for elements of this type; complex numbers are reduced by their parts. None if this
// version of NCCL, or GPUs of this compute capability (90 is 9.0), do not support it.
std::optional<ncclDataType_t> nccl_type(DType dtype, int version, int capability);
// None if NCCL does not support it. For bool, "or" is the maximum of bytes and "and" the minimum.
std::optional<ncclRedOp_t> nccl_op(ReduceOp op, DType dtype);

// For the thread that runs the progress loop. Every function throws Error(HP_ABORTED) with NCCL's
// text.
class NcclCommunicator {
 public:
  // The id by which ranks find each other; one rank creates it.
  static ncclUniqueId make_id(const Device& device);

  // Starts to connect rank `rank` of `size` ranks with the others.
  NcclCommunicator(std::shared_ptr<Device> device, const ncclUniqueId& id, int size, int rank);
  ~NcclCommunicator();  // aborts, unless closed
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  // Whether the last call has completed, so that the next one may be made. Also reports errors of
  // running work.
  bool settled();

  // begin() and end() enclose one NCCL group. Addresses are in GPU memory; counts are in elements.
  void begin() const;
  void end() const;
  void allreduce(CUdeviceptr from, CUdeviceptr to, std::size_t count, DType, ReduceOp, CUstream);
  void reducescatter(CUdeviceptr from, CUdeviceptr to, std::size_t count_of_each, DType, ReduceOp,
                     CUstream);
  void reduce(CUdeviceptr from, CUdeviceptr to, std::size_t count, DType, ReduceOp, int root,
              CUstream);
  void allgather(CUdeviceptr from, CUdeviceptr to, std::size_t bytes_of_each, CUstream);
  void broadcast(CUdeviceptr from, CUdeviceptr to, std::size_t bytes, int root, CUstream);
  void send(CUdeviceptr from, std::size_t bytes, int rank, CUstream);
  void receive(CUdeviceptr to, std::size_t bytes, int rank, CUstream);

  // Destroys the communicator when no rank has work in progress. Waits for the other ranks for a
  // short time.
  void close();
  // Ends the communicator at once: work on the GPU ends with undefined results. Never throws.
  void abort();

 private:
  void check(ncclResult_t result, const char* call) const;

  const std::shared_ptr<Device> device_;
  const NcclApi& api_;
  ncclComm_t communicator_ = nullptr;
};

}  // namespace horoplug::cuda
