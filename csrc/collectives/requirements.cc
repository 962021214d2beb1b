#include "collectives/requirements.h"

#include <bit>

#include "collectives/gpu/gpu_group.h"

namespace horoplug::requirements {
namespace {

bool is_adasum(const Call& call) { return call.reduce_op == ReduceOp::kAdasum; }

bool has_partial_sums(const Call& call) { return call.wire == nullptr || call.wire->partial_sums; }

bool on_gpus(const Call& call) { return call.wire == nullptr || call.wire->on_gpu; }

bool reduced_by_nccl(const Comm& comm, const Call& call) {
  return has_partial_sums(call) && on_gpus(call) &&
         comm.gpu()->nccl_reduces(call.reduce_op, call.dtype);
}

}  // namespace

bool alone(const Comm& comm, const Call&) { return comm.size() == 1; }

bool on_one_host(const Comm& comm, const Call&) {
  return comm.size() > 1 && comm.host_memory() != nullptr;
}

bool has_peers(const Comm& comm, const Call&) { return comm.size() > 1; }

bool elementwise_on_one_host(const Comm& comm, const Call& call) {
  return on_one_host(comm, call) && !is_adasum(call);
}

bool fits_into_lines(const Comm& comm, const Call& call) {
  return elementwise_on_one_host(comm, call) && call.bytes() <= Arena::kLineBytes;
}

bool elementwise(const Comm& comm, const Call& call) {
  return has_peers(comm, call) && !is_adasum(call);
}

bool by_partial_sums(const Comm& comm, const Call& call) {
  return elementwise(comm, call) && has_partial_sums(call);
}

bool adasum(const Comm& comm, const Call& call) {
  return has_peers(comm, call) && is_adasum(call) &&
         std::has_single_bit(static_cast<unsigned>(comm.size()));
}

bool adasum_on_one_host(const Comm& comm, const Call& call) {
  return adasum(comm, call) && comm.host_memory() != nullptr;
}

bool on_many_hosts(const Comm& comm, const Call& call) {
  return comm.works_in_hosts() && !is_adasum(call) && has_partial_sums(call);
}

bool on_even_hosts(const Comm& comm, const Call& call) {
  return on_many_hosts(comm, call) && comm.hosts()->even();
}

bool by_mpi(const Comm& comm, const Call& call) {
  if (!has_peers(comm, call) || comm.mpi() == nullptr || !comm.mpi()->has(call.kind)) return false;
  if (reduces(call.kind)) {
    if (!has_partial_sums(call)) return false;
    // MPI does not define a minimum with NaNs.
    const bool orders = call.reduce_op == ReduceOp::kMin || call.reduce_op == ReduceOp::kMax;
    if (orders && is_floating(call.dtype)) return false;
    if (!comm.mpi()->can_reduce(call.dtype, call.reduce_op)) return false;
  }
  switch (call.kind) {
    case OpKind::kReducescatter:
      return call.bytes() / dtype_size(call.dtype) <= Mpi::kMostElements;
    case OpKind::kAllgather:
      return call.bytes() <= Mpi::kMostElements;
    case OpKind::kAlltoall:  // no rank can send or receive more than the total
      return call.all_bytes <= Mpi::kMostElements;
    case OpKind::kBarrier:  // the barrier of a plan's batch comes before any MPI call
      return !comm.planned();
    default:
      return true;
  }
}

bool by_nccl(const Comm& comm, const Call& call) {
  if (comm.gpu() == nullptr || comm.gpu()->nccl() == nullptr) return false;
  return !reduces(call.kind) || reduced_by_nccl(comm, call);
}

bool by_ipc(const Comm& comm, const Call& call) {
  return comm.gpu() != nullptr && comm.gpu()->ipc() != nullptr && !is_adasum(call) && on_gpus(call);
}

bool through_cpu(const Comm& comm, const Call& call) {
  return has_peers(comm, call) || !on_gpus(call);
}

bool alone_on_gpu(const Comm& comm, const Call& call) { return alone(comm, call) && on_gpus(call); }

bool adasum_by_nccl(const Comm& comm, const Call& call) {
  return adasum(comm, call) && comm.gpu() != nullptr && comm.gpu()->nccl() != nullptr;
}

bool adasum_by_ipc(const Comm& comm, const Call& call) {
  return adasum(comm, call) && comm.gpu() != nullptr && comm.gpu()->ipc() != nullptr;
}

bool on_gpu_by_mpi(const Comm& comm, const Call& call) {
  const Mpi::OnGpu needed = reduces(call.kind) ? Mpi::OnGpu::kAll : Mpi::OnGpu::kMoves;
  return comm.gpu() != nullptr && comm.gpu()->mpi() >= needed && by_mpi(comm, call);
}

bool by_hosts(const Comm& comm, const Call& call) {
  if (!on_even_hosts(comm, call) || !on_gpus(call) || comm.gpu() == nullptr) return false;
  return comm.gpu()->works_in_hosts(reduced_by_nccl(comm, call));
}

}  // namespace horoplug::requirements
