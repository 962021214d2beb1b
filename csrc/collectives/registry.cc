// The table of algorithms.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "collectives/collective.h"
#include "collectives/gpu/gpu_group.h"

namespace horoplug {
namespace {

bool alone(const Comm& comm, const Call&) { return comm.size() == 1; }
bool on_one_host(const Comm& comm, const Call&) {
  return comm.size() > 1 && comm.shared() != nullptr;
}
bool always(const Comm& comm, const Call&) { return comm.size() > 1; }

// Allreduce has two kinds of reduction: element by element, and Adasum.
bool is_adasum(const Call& call) { return call.reduce_op == ReduceOp::kAdasum; }
bool elementwise_on_one_host(const Comm& comm, const Call& call) {
  return on_one_host(comm, call) && !is_adasum(call);
}
bool fits_into_lines(const Comm& comm, const Call& call) {
  return elementwise_on_one_host(comm, call) && call.bytes() <= Arena::kLineBytes;
}
bool elementwise(const Comm& comm, const Call& call) {
  return always(comm, call) && !is_adasum(call);
}
bool adasum(const Comm& comm, const Call& call) {
  return always(comm, call) && is_adasum(call) &&
         std::has_single_bit(static_cast<unsigned>(comm.size()));
}
bool adasum_on_one_host(const Comm& comm, const Call& call) {
  return adasum(comm, call) && comm.shared() != nullptr;
}

bool on_many_hosts(const Comm& comm, const Call& call) {
  return comm.local() != nullptr && !is_adasum(call);
}

bool by_mpi(const Comm& comm, const Call& call) {
  return always(comm, call) && comm.mpi() != nullptr && comm.mpi()->has(call.kind);
}
// What a minimum with NaNs is, MPI does not say.
bool reduced_by_mpi(const Comm& comm, const Call& call) {
  const bool orders = call.reduce_op == ReduceOp::kMin || call.reduce_op == ReduceOp::kMax;
  if (orders && is_floating(call.dtype)) return false;
  return by_mpi(comm, call) && comm.mpi()->can_reduce(call.dtype, call.reduce_op);
}
bool scattered_by_mpi(const Comm& comm, const Call& call) {
  return reduced_by_mpi(comm, call) && call.bytes() / dtype_size(call.dtype) <= Mpi::kMostElements;
}
bool gathered_by_mpi(const Comm& comm, const Call& call) {
  return by_mpi(comm, call) && call.bytes() <= Mpi::kMostElements;
}
// No rank can have more to send or to receive than all together.
bool exchanged_by_mpi(const Comm& comm, const Call& call) {
  return by_mpi(comm, call) && call.all_bytes <= Mpi::kMostElements;
}
// By other means ranks meet in a plan, before MPI may begin anything.
bool met_by_mpi(const Comm& comm, const Call& call) {
  return by_mpi(comm, call) && !comm.planned();
}

bool reduced_by_nccl(const Call& call) {
  return cuda::nccl_type(call.dtype) && cuda::nccl_op(call.reduce_op, call.dtype);
}
bool by_nccl(const Comm& comm, const Call& call) {
  if (comm.gpu() == nullptr || comm.gpu()->nccl() == nullptr) return false;
  return !reduces(call.kind) || reduced_by_nccl(call);
}

bool by_ipc(const Comm& comm, const Call& call) {
  return comm.gpu() != nullptr && comm.gpu()->ipc() != nullptr && !is_adasum(call);
}

bool adasum_by_nccl(const Comm& comm, const Call& call) {
  return adasum(comm, call) && comm.gpu() != nullptr && comm.gpu()->nccl() != nullptr;
}
bool adasum_by_ipc(const Comm& comm, const Call& call) {
  return adasum(comm, call) && comm.gpu() != nullptr && comm.gpu()->ipc() != nullptr;
}

// The same as on the host, if MPI takes the memory of all ranks' GPUs.
template <bool (*can)(const Comm&, const Call&)>
bool on_gpu_by_mpi(const Comm& comm, const Call& call) {
  return comm.gpu() != nullptr &&
         comm.gpu()->mpi() >= (reduces(call.kind) ? Mpi::OnGpu::kAll : Mpi::OnGpu::kMoves) &&
         can(comm, call);
}

// Reduced in each host first, on its GPUs.
bool by_hosts(const Comm& comm, const Call& call) {
  if (!on_many_hosts(comm, call) || comm.gpu() == nullptr) return false;
  return comm.gpu()->works_in_hosts(reduced_by_nccl(call));
}

// Cost model: microseconds, from a latency per message and a time per byte.
double free_of_charge(const Comm&, double) { return 0; }
double steps(const Comm& comm) { return std::ceil(std::log2(comm.size())); }
double cost_direct(const Comm& comm, double bytes) {
  const LinkCosts& link = comm.costs().shared;
  return 2 * link.latency + 3 * bytes * link.byte;
}
// Every rank reads all of everybody's.
double cost_lines(const Comm& comm, double bytes) {
  const LinkCosts& link = comm.costs().shared;
  return link.latency + comm.size() * bytes * link.byte;
}
double cost_ring(const Comm& comm, double bytes) {
  const LinkCosts& link = comm.costs().stream;
  return 2 * (comm.size() - 1) * (link.latency + bytes / comm.size() * link.byte);
}
// What comes from all sides at once is in each other's way, the more so the more hosts there are.
double cost_pairwise(const Comm& comm, double bytes) {
  constexpr double kIncast = 0.01;
  const LinkCosts& link = comm.costs().stream;
  const double others = comm.size() - 1;
  return 2 * (link.latency + (others - 1) * comm.costs().message) +
         2 * others / comm.size() * bytes * link.byte * (1 + (others - 1) * kIncast);
}
// Nothing is reduced while it comes in, and nothing leaves while it is reduced.
double cost_doubling(const Comm& comm, double bytes) {
  constexpr double kIdle = 1.1;
  const LinkCosts& link = comm.costs().stream;
  return steps(comm) * (link.latency + bytes * link.byte * kIdle);
}
// Each rank of a host has its slice on the host's line.
double cost_between_hosts(const Comm& comm, double bytes) {
  const double hosts = comm.slice()->size();
  const LinkCosts& link = comm.costs().stream;
  return std::min(cost_pairwise(*comm.slice(), bytes),
                  2 * (hosts - 1) * link.latency + 2 * (hosts - 1) / hosts * bytes * link.byte);
}
// Twice through shared memory.
double cost_hierarchical(const Comm& comm, double bytes) {
  return 2 * cost_direct(comm, bytes) + cost_between_hosts(comm, bytes);
}
// As measured. What does not commit has to meet first in a plan.
template <OpKind kind>
double cost_mpi(const Comm& comm, double bytes) {
  const LinkCosts& own = comm.costs().mpi[static_cast<std::size_t>(kind)];
  const double meeting = comm.planned() ? steps(comm) * comm.costs().stream.latency : 0;
  return meeting + own.latency + bytes * own.byte;
}
// Halvings and their way back, and the sums of dot products: one exchange more at every distance.
double cost_halving(const Comm& comm, double bytes) {
  const LinkCosts& link = comm.costs().stream;
  const double exchanges = 2 * steps(comm) + steps(comm) * (steps(comm) + 1) / 2;
  return exchanges * link.latency + 2 * (comm.size() - 1) * bytes / comm.size() * link.byte;
}
double cost_chain(const Comm& comm, double bytes) {
  const LinkCosts& link = comm.costs().stream;
  return (comm.size() - 1) * (link.latency + Comm::kChunkBytes * link.byte) + bytes * link.byte;
}
// All of it over the root's link.
double cost_linear(const Comm& comm, double bytes) {
  const LinkCosts& link = comm.costs().stream;
  return link.latency + (comm.size() - 2) * comm.costs().message + bytes * link.byte;
}
double cost_half_ring(const Comm& comm, double bytes) { return cost_ring(comm, bytes) / 2; }
double cost_nccl(const Comm& comm, double bytes) {
  const LinkCosts& gpus = comm.costs().gpus;
  return gpus.latency + 2 * bytes * gpus.byte;
}
// Small data is read from every rank; of large data, each rank reads what the others have reduced.
double cost_ipc(const Comm& comm, double bytes) {
  const LinkCosts& peers = comm.costs().ipc;
  const double others = comm.size() - 1;
  return std::min(peers.latency + others * bytes * peers.byte,
                  2 * (peers.latency + others / comm.size() * bytes * peers.byte));
}
// Whole vectors, at every distance.
double cost_gpu_adasum(const Comm& comm, const LinkCosts& link, double bytes) {
  return steps(comm) * (link.latency + bytes * link.byte);
}
double cost_adasum_nccl(const Comm& comm, double bytes) {
  return cost_gpu_adasum(comm, comm.costs().gpus, bytes);
}
double cost_adasum_ipc(const Comm& comm, double bytes) {
  return cost_gpu_adasum(comm, comm.costs().ipc, bytes);
}
// To the host, through what the ranks have there, and back.
double cost_staged(const Comm& comm, double bytes) {
  const LinkCosts& bus = comm.costs().bus;
  const double there = comm.shared() != nullptr ? cost_direct(comm, bytes) : cost_ring(comm, bytes);
  return 2 * (bus.latency + bytes * bus.byte) + there;
}

// Not measured. Between the two, as MPI does without the host's memory, or not, as it likes.
double cost_gpu_mpi(const Comm& comm, double bytes) {
  return (cost_nccl(comm, bytes) + cost_staged(comm, bytes)) / 2;
}

// Slices, to the host and back, and twice among the GPUs.
double cost_gpu_hierarchical(const Comm& comm, double bytes) {
  const LinkCosts& bus = comm.costs().bus;
  const LinkCosts& devices = comm.gpu()->nccl_in_hosts() ? comm.costs().gpus : comm.costs().ipc;
  return 2 * (devices.latency + bytes * devices.byte) +
         2 * (bus.latency + bytes / comm.host()->size() * bus.byte) +
         cost_between_hosts(comm, bytes);
}

constexpr bool kOnGpu = true;

constexpr Algorithm kAlgorithms[] = {
    {OpKind::kAllreduce, "lines", "shm", fits_into_lines, cost_lines, allreduce_lines, true},
    {OpKind::kAllreduce, "direct", "shm", elementwise_on_one_host, cost_direct, allreduce_direct,
     true},
    {OpKind::kAllreduce, "pairwise", "stream", elementwise, cost_pairwise, allreduce_pairwise,
     true},
    {OpKind::kAllreduce, "ring", "stream", elementwise, cost_ring, allreduce_ring, false},
    {OpKind::kAllreduce, "doubling", "stream", elementwise, cost_doubling, allreduce_doubling,
     true},
    {OpKind::kAllreduce, "hierarchical", "mixed", on_many_hosts, cost_hierarchical,
     allreduce_hierarchical, true},
    {OpKind::kAllreduce, "mpi", "mpi", reduced_by_mpi, cost_mpi<OpKind::kAllreduce>, allreduce_mpi,
     false},
    {OpKind::kAllreduce, "adasum_direct", "shm", adasum_on_one_host, cost_direct,
     allreduce_adasum_direct, true},
    {OpKind::kAllreduce, "adasum_halving", "stream", adasum, cost_halving, allreduce_adasum_halving,
     false},
    {OpKind::kAllreduce, "adasum_doubling", "stream", adasum, cost_doubling,
     allreduce_adasum_doubling, false},
    {OpKind::kAllreduce, "copy", "self", alone, free_of_charge, local_copy, true},
    {OpKind::kAllgather, "direct", "shm", on_one_host, cost_direct, allgather_direct, true},
    {OpKind::kAllgather, "ring", "stream", always, cost_half_ring, allgather_ring, false},
    {OpKind::kAllgather, "mpi", "mpi", gathered_by_mpi, cost_mpi<OpKind::kAllgather>, allgather_mpi,
     false},
    {OpKind::kAllgather, "copy", "self", alone, free_of_charge, local_copy, true},
    {OpKind::kBroadcast, "direct", "shm", on_one_host, cost_direct, broadcast_direct, false},
    {OpKind::kBroadcast, "tree", "stream", always, cost_doubling, broadcast_tree, false},
    {OpKind::kBroadcast, "chain", "stream", always, cost_chain, broadcast_chain, false},
    {OpKind::kBroadcast, "mpi", "mpi", by_mpi, cost_mpi<OpKind::kBroadcast>, broadcast_mpi, false},
    {OpKind::kBroadcast, "copy", "self", alone, free_of_charge, local_copy, true},
    {OpKind::kAlltoall, "direct", "shm", on_one_host, cost_direct, alltoall_direct, true},
    {OpKind::kAlltoall, "pairwise", "stream", always, cost_half_ring, alltoall_pairwise, false},
    {OpKind::kAlltoall, "mpi", "mpi", exchanged_by_mpi, cost_mpi<OpKind::kAlltoall>, alltoall_mpi,
     false},
    {OpKind::kAlltoall, "copy", "self", alone, free_of_charge, local_copy, true},
    {OpKind::kReducescatter, "direct", "shm", on_one_host, cost_direct, reducescatter_direct, true},
    {OpKind::kReducescatter, "ring", "stream", always, cost_half_ring, reducescatter_ring, true},
    {OpKind::kReducescatter, "mpi", "mpi", scattered_by_mpi, cost_mpi<OpKind::kReducescatter>,
     reducescatter_mpi, false},
    {OpKind::kReducescatter, "copy", "self", alone, free_of_charge, local_copy, true},
    {OpKind::kBarrier, "direct", "shm", on_one_host, cost_direct, barrier_direct, true},
    {OpKind::kBarrier, "dissemination", "stream", always, cost_doubling, barrier_dissemination,
     true},
    {OpKind::kBarrier, "mpi", "mpi", met_by_mpi, cost_mpi<OpKind::kBarrier>, barrier_mpi, false},
    {OpKind::kBarrier, "copy", "self", alone, free_of_charge, local_copy, true},
    {OpKind::kReduce, "direct", "shm", on_one_host, cost_direct, reduce_direct, true},
    {OpKind::kReduce, "tree", "stream", always, cost_doubling, reduce_tree, false},
    {OpKind::kReduce, "chain", "stream", always, cost_chain, reduce_chain, false},
    {OpKind::kReduce, "copy", "self", alone, free_of_charge, local_copy, true},
    {OpKind::kGather, "direct", "shm", on_one_host, cost_direct, gather_direct, false},
    {OpKind::kGather, "linear", "stream", always, cost_linear, gather_linear, false},
    {OpKind::kGather, "copy", "self", alone, free_of_charge, local_copy, true},
    {OpKind::kScatter, "direct", "shm", on_one_host, cost_direct, scatter_direct, false},
    {OpKind::kScatter, "linear", "stream", always, cost_linear, scatter_linear, false},
    {OpKind::kScatter, "copy", "self", alone, free_of_charge, local_copy, true},
    {OpKind::kReduce, "nccl", "gpu", by_nccl, cost_nccl, gpu_nccl, false, kOnGpu},
    {OpKind::kReduce, "staged", "gpu", always, cost_staged, gpu_staged, false, kOnGpu},
    {OpKind::kReduce, "copy", "gpu", alone, free_of_charge, gpu_copy, true, kOnGpu},
    {OpKind::kGather, "nccl", "gpu", by_nccl, cost_nccl, gpu_nccl, false, kOnGpu},
    {OpKind::kGather, "staged", "gpu", always, cost_staged, gpu_staged, false, kOnGpu},
    {OpKind::kGather, "copy", "gpu", alone, free_of_charge, gpu_copy, true, kOnGpu},
    {OpKind::kScatter, "nccl", "gpu", by_nccl, cost_nccl, gpu_nccl, false, kOnGpu},
    {OpKind::kScatter, "staged", "gpu", always, cost_staged, gpu_staged, false, kOnGpu},
    {OpKind::kScatter, "copy", "gpu", alone, free_of_charge, gpu_copy, true, kOnGpu},
    {OpKind::kAllreduce, "nccl", "gpu", by_nccl, cost_nccl, gpu_nccl, false, kOnGpu},
    {OpKind::kAllreduce, "ipc", "gpu", by_ipc, cost_ipc, gpu_ipc, false, kOnGpu},
    {OpKind::kAllreduce, "nccl", "gpu", adasum_by_nccl, cost_adasum_nccl, gpu_adasum_nccl, false,
     kOnGpu},
    {OpKind::kAllreduce, "ipc", "gpu", adasum_by_ipc, cost_adasum_ipc, gpu_adasum_ipc, false,
     kOnGpu},
    {OpKind::kAllreduce, "mpi", "gpu", on_gpu_by_mpi<reduced_by_mpi>, cost_gpu_mpi, gpu_mpi, false,
     kOnGpu},
    {OpKind::kAllreduce, "hierarchical", "gpu", by_hosts, cost_gpu_hierarchical, gpu_hierarchical,
     false, kOnGpu},
    {OpKind::kAllreduce, "staged", "gpu", always, cost_staged, gpu_staged, false, kOnGpu},
    {OpKind::kAllreduce, "copy", "gpu", alone, free_of_charge, gpu_copy, true, kOnGpu},
    {OpKind::kAllgather, "nccl", "gpu", by_nccl, cost_nccl, gpu_nccl, false, kOnGpu},
    {OpKind::kAllgather, "ipc", "gpu", by_ipc, cost_ipc, gpu_ipc, false, kOnGpu},
    {OpKind::kAllgather, "mpi", "gpu", on_gpu_by_mpi<gathered_by_mpi>, cost_gpu_mpi, gpu_mpi, false,
     kOnGpu},
    {OpKind::kAllgather, "staged", "gpu", always, cost_staged, gpu_staged, false, kOnGpu},
    {OpKind::kAllgather, "copy", "gpu", alone, free_of_charge, gpu_copy, true, kOnGpu},
    {OpKind::kBroadcast, "nccl", "gpu", by_nccl, cost_nccl, gpu_nccl, false, kOnGpu},
    {OpKind::kBroadcast, "ipc", "gpu", by_ipc, cost_ipc, gpu_ipc, false, kOnGpu},
    {OpKind::kBroadcast, "mpi", "gpu", on_gpu_by_mpi<by_mpi>, cost_gpu_mpi, gpu_mpi, false, kOnGpu},
    {OpKind::kBroadcast, "staged", "gpu", always, cost_staged, gpu_staged, false, kOnGpu},
    {OpKind::kBroadcast, "copy", "gpu", alone, free_of_charge, gpu_copy, true, kOnGpu},
    {OpKind::kAlltoall, "nccl", "gpu", by_nccl, cost_nccl, gpu_nccl, false, kOnGpu},
    {OpKind::kAlltoall, "ipc", "gpu", by_ipc, cost_ipc, gpu_ipc, false, kOnGpu},
    {OpKind::kAlltoall, "mpi", "gpu", on_gpu_by_mpi<exchanged_by_mpi>, cost_gpu_mpi, gpu_mpi, false,
     kOnGpu},
    {OpKind::kAlltoall, "staged", "gpu", always, cost_staged, gpu_staged, false, kOnGpu},
    {OpKind::kAlltoall, "copy", "gpu", alone, free_of_charge, gpu_copy, true, kOnGpu},
    {OpKind::kReducescatter, "nccl", "gpu", by_nccl, cost_nccl, gpu_nccl, false, kOnGpu},
    {OpKind::kReducescatter, "ipc", "gpu", by_ipc, cost_ipc, gpu_ipc, false, kOnGpu},
    {OpKind::kReducescatter, "mpi", "gpu", on_gpu_by_mpi<scattered_by_mpi>, cost_gpu_mpi, gpu_mpi,
     false, kOnGpu},
    {OpKind::kReducescatter, "staged", "gpu", always, cost_staged, gpu_staged, false, kOnGpu},
    {OpKind::kReducescatter, "copy", "gpu", alone, free_of_charge, gpu_copy, true, kOnGpu},
};

}  // namespace

std::span<const Algorithm> algorithms() { return kAlgorithms; }

bool may_work_in_hosts(const Comm& comm, const Call& call, const char* forced) {
  const bool may =
      call.kind == OpKind::kAllreduce && on_many_hosts(comm, call) && !by_nccl(comm, call);
  if (!may || forced == nullptr) return may;
  return std::strcmp(choose_algorithm(comm, call, forced).name, forced) != 0;
}

std::size_t Call::bytes() const {
  if (layout != nullptr) return layout->bytes();
  if (kind == OpKind::kAlltoall) return all_bytes / std::max<std::size_t>(send_bytes.size(), 1);
  std::size_t sum = 0;
  for (const std::size_t part : receive_bytes) sum += part;
  return sum;
}

const Algorithm& choose_algorithm(const Comm& comm, const Call& call, const char* forced) {
  const Algorithm* best = nullptr;
  double best_cost = 0;
  for (const Algorithm& candidate : kAlgorithms) {
    if (candidate.kind != call.kind || candidate.on_gpu != call.on_gpu) continue;
    if (!candidate.can(comm, call)) continue;
    if (forced != nullptr && std::strcmp(candidate.name, forced) == 0) return candidate;
    const double cost = candidate.cost(comm, static_cast<double>(call.bytes()));
    if (best == nullptr || cost < best_cost) {
      best = &candidate;
      best_cost = cost;
    }
  }
  if (best == nullptr) throw std::logic_error("no algorithm");
  return *best;
}

}  // namespace horoplug
