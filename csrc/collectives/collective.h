// A call of a collective, and the table of the algorithms that can run it.
//
// An algorithm is one function: a coroutine over a Comm and a Call. All ranks must choose the same
// algorithm, so `can` and `cost` depend only on values that are equal on all ranks.
#pragma once

#include <cstddef>
#include <span>

#include "base/operations.h"
#include "base/task.h"
#include "base/types.h"
#include "collectives/comm.h"
#include "collectives/layout.h"
#include "device/cpu/kernels.h"

namespace horoplug {

// One collective operation on this rank. The fields in use depend on `kind`:
//   allreduce      layout (inputs and outputs), reduce_op, reduce, finish
//   broadcast      layout, root
//   reduce         layout, root, reduce_op, reduce, finish; only the root's outputs are written
//   reducescatter  layout (input only), reduce, finish, output,
//                  receive_bytes[r] = size of rank r's part
//   allgather      input, output, receive_bytes[r] = size of rank r's contribution
//   gather         root, input, receive_bytes[r] = size of rank r's contribution;
//                  output on the root
//   scatter        root, output, receive_bytes[r] = size of rank r's part; input on the root
//   alltoall       input, output, send_bytes[r], receive_bytes[r]; both buffers hold the parts
//                  in rank order; all_bytes
//   barrier        none
struct Call {
  OpKind kind = OpKind::kBarrier;
  DType dtype = DType::kUInt8;       // of the elements of the buffer
  const WireFormat* wire = nullptr;  // the format of the buffer; nullptr: the tensors' own
  Layout* layout = nullptr;
  ReduceOp reduce_op = ReduceOp::kSum;
  ReduceFn reduce = nullptr;  // Adasum: used for scaling only
  Finish finish;
  // allreduce: the location of the tensors in a shared buffer, if all of them lie in one and are
  // reduced in place: a number that is equal on ranks whose tensors have the same offsets in the
  // same buffer, and for each rank the distance from this rank's part of the buffer to that rank's.
  // 0: the tensors lie elsewhere.
  std::uint64_t place = 0;
  std::span<const std::ptrdiff_t> distances;
  int root = 0;
  // The tensors are on the set's GPU (Comm::gpu). The call ends when its work is enqueued in the
  // GPU's stream.
  bool on_gpu = false;
  const std::byte* input = nullptr;
  std::byte* output = nullptr;
  std::span<const std::size_t> send_bytes;
  std::span<const std::size_t> receive_bytes;
  std::size_t all_bytes = 0;  // sum over all ranks; equal on all ranks

  // The bytes that `reduce` counts as one. The buffer is divided at multiples of them.
  std::size_t grain() const { return wire != nullptr ? wire->block_bytes : dtype_size(dtype); }
  // The payload size, equal on all ranks. For alltoall, where ranks send different amounts, the
  // mean.
  std::size_t bytes() const;
};

struct Algorithm {
  OpKind kind = OpKind::kBarrier;
  const char* name = nullptr;    // the value of HOROPLUG_ALGORITHM
  const char* medium = nullptr;  // "self", "shm", "stream", "mixed", "mpi" or "gpu"
  bool (*can)(const Comm& comm, const Call& call) = nullptr;
  // Estimated microseconds for `bytes` bytes on the ranks of `comm`.
  double (*cost)(const Comm& comm, double bytes) = nullptr;
  Task (*run)(Comm& comm, Call& call) = nullptr;
  // Whether no output, which may also be an input, is written before this call has received data
  // from every rank, directly or through a rank that has received from it. No rank completes before
  // that either. In a plan, ranks run a barrier before any other algorithm.
  bool defers_writes = false;
  bool on_gpu = false;  // for GPU tensors
};

std::span<const Algorithm> algorithms();

// Returns the cheapest algorithm that can run this call; the one named `forced` if it can.
const Algorithm& choose_algorithm(const Comm& comm, const Call& call, const char* forced);

// For GPU tensors: whether the choice depends on the capabilities of the GPUs of each host among
// themselves (GpuGroup::agree_in_hosts).
bool may_work_in_hosts(const Comm& comm, const Call& call, const char* forced);

// Each algorithm is defined in the file of its name, without the name of the folder: gpu_nccl() in
// gpu/nccl.cc. The exceptions: cpu_mpi() is in mpi/collectives.cc, allreduce_lines() in
// shm/allreduce_flag_lines.cc, gpu_adasum_*() in adasum/gpu.cc, and *_chain() beside *_tree().
Task cpu_mpi(Comm& comm, Call& call);  // every operation, by MPI's own collectives
Task allreduce_lines(Comm& comm, Call& call);
Task allreduce_direct(Comm& comm, Call& call);
Task allreduce_ring(Comm& comm, Call& call);
Task allreduce_pairwise(Comm& comm, Call& call);
Task allreduce_hierarchical(Comm& comm, Call& call);
Task allreduce_doubling(Comm& comm, Call& call);
Task allreduce_adasum_direct(Comm& comm, Call& call);
Task allreduce_adasum_halving(Comm& comm, Call& call);
Task allreduce_adasum_doubling(Comm& comm, Call& call);
Task allgather_ring(Comm& comm, Call& call);
Task allgather_bruck(Comm& comm, Call& call);
Task allgather_hierarchical(Comm& comm, Call& call);
Task broadcast_direct(Comm& comm, Call& call);
Task broadcast_tree(Comm& comm, Call& call);
Task broadcast_chain(Comm& comm, Call& call);
Task alltoall_direct(Comm& comm, Call& call);
Task alltoall_pairwise(Comm& comm, Call& call);
Task reducescatter_direct(Comm& comm, Call& call);
Task reducescatter_ring(Comm& comm, Call& call);
Task reducescatter_halving(Comm& comm, Call& call);
Task reducescatter_hierarchical(Comm& comm, Call& call);
Task reduce_direct(Comm& comm, Call& call);
Task reduce_tree(Comm& comm, Call& call);
Task reduce_chain(Comm& comm, Call& call);
Task gather_direct(Comm& comm, Call& call);  // and allgather
Task gather_linear(Comm& comm, Call& call);
Task scatter_direct(Comm& comm, Call& call);
Task scatter_linear(Comm& comm, Call& call);
Task barrier_direct(Comm& comm, Call& call);
Task barrier_dissemination(Comm& comm, Call& call);
Task local_copy(Comm& comm, Call& call);  // every operation, on a process set of one
// For GPU tensors.
Task gpu_copy(Comm& comm, Call& call);          // every operation, on a process set of one
Task gpu_nccl(Comm& comm, Call& call);          // every operation except Adasum
Task gpu_ipc(Comm& comm, Call& call);           // likewise
Task gpu_mpi(Comm& comm, Call& call);           // likewise
Task gpu_hierarchical(Comm& comm, Call& call);  // allreduce over several hosts
Task gpu_staged(Comm& comm, Call& call);        // every operation, through the CPU's memory
Task gpu_adasum_nccl(Comm& comm, Call& call);
Task gpu_adasum_ipc(Comm& comm, Call& call);

}  // namespace horoplug
