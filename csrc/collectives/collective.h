// A call of a collective, and the table of the algorithms that can run it.
//
// An algorithm is one function in a file of its own: a coroutine over a Comm and a Call. All ranks
// must choose the same one, so `can` and `cost` depend only on what all ranks know alike.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "base/operations.h"
#include "base/task.h"
#include "base/types.h"
#include "collectives/comm.h"
#include "collectives/layout.h"
#include "device/cpu/kernels.h"

namespace horoplug {

// One collective operation on this rank. Which fields count depends on `kind`:
//   allreduce      layout (inputs and outputs), reduce_op, reduce, finish
//   broadcast      layout, root
//   reduce         layout, root, reduce_op, reduce, finish; outputs are written on the root only
//   reducescatter  layout (input only), reduce, finish, output, receive_bytes[r] = size of rank r's
//                  part
//   allgather      input, output, receive_bytes[r] = size of rank r's contribution
//   gather         root, input, receive_bytes[r] = size of rank r's contribution; output on the
//   root scatter        root, output, receive_bytes[r] = size of rank r's part; input on the root
//   alltoall       input, output, send_bytes[r], receive_bytes[r]; both buffers hold the parts in
//                  rank order; all_bytes
//   barrier        nothing
struct Call {
  OpKind kind = OpKind::kBarrier;
  DType dtype = DType::kUInt8;
  Layout* layout = nullptr;
  ReduceOp reduce_op = ReduceOp::kSum;
  ReduceFn reduce = nullptr;  // with Adasum: for scaling only
  Finish finish;
  // allreduce: where in a shared buffer all tensors lie, in place, if they do: a number that is
  // equal on ranks whose tensors have the same offsets in the same buffer, and by rank the distance
  // from this rank's part of the buffer to theirs. 0: they do not.
  std::uint64_t place = 0;
  std::span<const std::ptrdiff_t> distances;
  int root = 0;
  // The tensors lie on the set's GPU (Comm::gpu); the call is over when its work is in the GPU's
  // stream.
  bool on_gpu = false;
  const std::byte* input = nullptr;
  std::byte* output = nullptr;
  std::span<const std::size_t> send_bytes;
  std::span<const std::size_t> receive_bytes;
  std::size_t all_bytes = 0;  // sent by all ranks together; the same on all ranks

  // Payload size, the same on all ranks. For alltoall, where ranks send different amounts, the
  // mean.
  std::size_t bytes() const;
};

struct Algorithm {
  OpKind kind = OpKind::kBarrier;
  const char* name = nullptr;    // what HOROPLUG_ALGORITHM takes
  const char* medium = nullptr;  // "self", "shm", "stream", "mixed", "mpi" or "gpu"
  bool (*can)(const Comm& comm, const Call& call) = nullptr;
  // Estimated microseconds for `bytes` bytes on the ranks of `comm`.
  double (*cost)(const Comm& comm, double bytes) = nullptr;
  Task (*run)(Comm& comm, Call& call) = nullptr;
  // Whether no output, which may be an input as well, is written before data has come in this call
  // from every rank, or from a rank that has heard from it. No rank completes before that either.
  // In a plan, ranks run a barrier before any other algorithm.
  bool defers_writes = false;
  bool on_gpu = false;  // for tensors on GPUs
};

std::span<const Algorithm> algorithms();

// The cheapest algorithm that can do this; one called `forced`, if it can, goes first.
const Algorithm& choose_algorithm(const Comm& comm, const Call& call, const char* forced);

// For tensors on GPUs: whether the choice depends on what the GPUs of each host can do by
// themselves (GpuGroup::agree_in_hosts).
bool may_work_in_hosts(const Comm& comm, const Call& call, const char* forced);

// Each algorithm is defined in the file of its name, host_mpi() in mpi/collectives.cc.
Task host_mpi(Comm& comm, Call& call);  // every operation, by MPI's own collectives
Task allreduce_lines(Comm& comm, Call& call);
Task allreduce_direct(Comm& comm, Call& call);
Task allreduce_ring(Comm& comm, Call& call);
Task allreduce_pairwise(Comm& comm, Call& call);
Task allreduce_hierarchical(Comm& comm, Call& call);
Task allreduce_doubling(Comm& comm, Call& call);
Task allreduce_adasum_direct(Comm& comm, Call& call);
Task allreduce_adasum_halving(Comm& comm, Call& call);
Task allreduce_adasum_doubling(Comm& comm, Call& call);
Task allgather_direct(Comm& comm, Call& call);
Task allgather_ring(Comm& comm, Call& call);
Task broadcast_direct(Comm& comm, Call& call);
Task broadcast_tree(Comm& comm, Call& call);
Task broadcast_chain(Comm& comm, Call& call);
Task alltoall_direct(Comm& comm, Call& call);
Task alltoall_pairwise(Comm& comm, Call& call);
Task reducescatter_direct(Comm& comm, Call& call);
Task reducescatter_ring(Comm& comm, Call& call);
Task reduce_direct(Comm& comm, Call& call);
Task reduce_tree(Comm& comm, Call& call);
Task reduce_chain(Comm& comm, Call& call);
Task gather_direct(Comm& comm, Call& call);
Task gather_linear(Comm& comm, Call& call);
Task scatter_direct(Comm& comm, Call& call);
Task scatter_linear(Comm& comm, Call& call);
Task barrier_direct(Comm& comm, Call& call);
Task barrier_dissemination(Comm& comm, Call& call);
Task local_copy(Comm& comm, Call& call);  // every operation, on a process set of one
// For tensors on GPUs.
Task gpu_copy(Comm& comm, Call& call);          // every operation, on a process set of one
Task gpu_nccl(Comm& comm, Call& call);          // every operation, but for Adasum
Task gpu_ipc(Comm& comm, Call& call);           // likewise
Task gpu_mpi(Comm& comm, Call& call);           // likewise
Task gpu_hierarchical(Comm& comm, Call& call);  // allreduce over several hosts
Task gpu_staged(Comm& comm, Call& call);        // every operation, through the host's memory
Task gpu_adasum_nccl(Comm& comm, Call& call);
Task gpu_adasum_ipc(Comm& comm, Call& call);

}  // namespace horoplug
