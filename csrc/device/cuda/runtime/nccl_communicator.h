// One communicator of NCCL: what a process set's ranks have in common there.
//
// It does not block: a call that has to wait for other ranks goes on by itself, and settled() says
// when the next one may be made. What is put into a stream runs when the other ranks have put
// theirs, in the same order.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>

#include "base/types.h"
#include "device/cuda/driver/nccl.h"
#include "device/cuda/runtime/device.h"

namespace horoplug::cuda {

// NCCL's number of the type that it reduces elements of this one as: complex numbers by their
// parts. None for what it does not know in this version, or on GPUs of this compute capability (90
// is 9.0).
std::optional<ncclDataType_t> nccl_type(DType dtype, int version, int capability);
// None for what it does not know. Of bool, "or" is the maximum of bytes, and "and" the minimum.
std::optional<ncclRedOp_t> nccl_op(ReduceOp op, DType dtype);

// For whoever drives the engine. Everything throws Error(HP_ABORTED) with NCCL's text.
class NcclCommunicator {
 public:
  // The name by which ranks find each other: one of them makes it.
  static ncclUniqueId make_id(const Device& device);

  // Begins to connect rank `rank` of `size` ranks with the others.
  NcclCommunicator(std::shared_ptr<Device> device, const ncclUniqueId& id, int size, int rank);
  ~NcclCommunicator();  // aborts, unless it was closed
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  // Whether the last call is over, so that the next one may be made; and errors of what runs.
  bool settled();

  // All that begin() and end() enclose is one call. Addresses are the GPU's; counts, of elements.
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

  // Its end, when nothing runs on any rank. Waits for the others, though not for long.
  void close();
  // Its end at once: what runs on the GPU ends, and its results are undefined. Never throws.
  void abort();

 private:
  void check(ncclResult_t result, const char* call) const;

  const std::shared_ptr<Device> device_;
  const NcclApi& api_;
  ncclComm_t communicator_ = nullptr;
};

}  // namespace horoplug::cuda
