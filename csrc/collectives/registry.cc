// The table of algorithms.
#include <algorithm>
#include <array>
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
  return comm.size() > 1 && comm.host_memory() != nullptr;
}
bool always(const Comm& comm, const Call&) { return comm.size() > 1; }

// An allreduce reduces either element by element or by Adasum.
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
  return adasum(comm, call) && comm.host_memory() != nullptr;
}

bool on_many_hosts(const Comm& comm, const Call& call) {
  return comm.local_memory() != nullptr && !is_adasum(call);
}

// Whether MPI has the collective, can count its data, and gives equal results on all ranks.
bool by_mpi(const Comm& comm, const Call& call) {
  if (!always(comm, call) || comm.mpi() == nullptr || !comm.mpi()->has(call.kind)) return false;
  if (reduces(call.kind)) {
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

bool reduced_by_nccl(const Comm& comm, const Call& call) {
  return comm.gpu()->nccl_reduces(call.reduce_op, call.dtype);
}
bool by_nccl(const Comm& comm, const Call& call) {
  if (comm.gpu() == nullptr || comm.gpu()->nccl() == nullptr) return false;
  return !reduces(call.kind) || reduced_by_nccl(comm, call);
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

// As on the host, if MPI accepts the memory of all ranks' GPUs.
bool on_gpu_by_mpi(const Comm& comm, const Call& call) {
  const Mpi::OnGpu needed = reduces(call.kind) ? Mpi::OnGpu::kAll : Mpi::OnGpu::kMoves;
  return comm.gpu() != nullptr && comm.gpu()->mpi() >= needed && by_mpi(comm, call);
}

// Reduced within each host first, on its GPUs.
bool by_hosts(const Comm& comm, const Call& call) {
  if (!on_many_hosts(comm, call) || comm.gpu() == nullptr) return false;
  return comm.gpu()->works_in_hosts(reduced_by_nccl(comm, call));
}

// Cost model: microseconds, from a latency per message and a time per byte.
double free_of_charge(const Comm&, double) { return 0; }
double steps(const Comm& comm) { return std::ceil(std::log2(comm.size())); }
double cost_direct(const Comm& comm, double bytes) {
  const LinkCosts& link = comm.costs().shared;
  return 2 * link.latency + 3 * bytes * link.byte;
}
// Every rank reads the whole data of all ranks.
double cost_lines(const Comm& comm, double bytes) {
  const LinkCosts& link = comm.costs().shared;
  return link.latency + comm.size() * bytes * link.byte;
}
double cost_ring(const Comm& comm, double bytes) {
  const LinkCosts& link = comm.costs().stream;
  return 2 * (comm.size() - 1) * (link.latency + bytes / comm.size() * link.byte);
}
// Flows from many hosts slow each other down, increasingly with the number of hosts.
double cost_pairwise(const Comm& comm, double bytes) {
  constexpr double kIncast = 0.01;
  const LinkCosts& link = comm.costs().stream;
  const double others = comm.size() - 1;
  return 2 * (link.latency + (others - 1) * comm.costs().message) +
         2 * others / comm.size() * bytes * link.byte * (1 + (others - 1) * kIncast);
}
// Receiving and reducing do not overlap, nor do reducing and sending.
double cost_doubling(const Comm& comm, double bytes) {
  constexpr double kIdle = 1.1;
  const LinkCosts& link = comm.costs().stream;
  return steps(comm) * (link.latency + bytes * link.byte * kIdle);
}
// Each rank of a host sends its slice over the host's link.
double cost_between_hosts(const Comm& comm, double bytes) {
  const double hosts = comm.cross_comm()->size();
  const LinkCosts& link = comm.costs().stream;
  return std::min(cost_pairwise(*comm.cross_comm(), bytes),
                  2 * (hosts - 1) * link.latency + 2 * (hosts - 1) / hosts * bytes * link.byte);
}
// Through shared memory twice.
double cost_hierarchical(const Comm& comm, double bytes) {
  return 2 * cost_direct(comm, bytes) + cost_between_hosts(comm, bytes);
}
// As measured. In a plan, an algorithm that does not defer writes needs a barrier first.
template <OpKind kind>
double cost_mpi(const Comm& comm, double bytes) {
  const LinkCosts& own = comm.costs().mpi[static_cast<std::size_t>(kind)];
  const double meeting = comm.planned() ? steps(comm) * comm.costs().stream.latency : 0;
  return meeting + own.latency + bytes * own.byte;
}
// The halving exchanges, their reverse, and the sums of dot products: one further exchange at every
// distance.
double cost_halving(const Comm& comm, double bytes) {
  const LinkCosts& link = comm.costs().stream;
  const double exchanges = 2 * steps(comm) + steps(comm) * (steps(comm) + 1) / 2;
  return exchanges * link.latency + 2 * (comm.size() - 1) * bytes / comm.size() * link.byte;
}
double cost_chain(const Comm& comm, double bytes) {
  const LinkCosts& link = comm.costs().stream;
  return (comm.size() - 1) * (link.latency + Comm::kChunkBytes * link.byte) + bytes * link.byte;
}
// All data crosses the root's link.
double cost_linear(const Comm& comm, double bytes) {
  const LinkCosts& link = comm.costs().stream;
  return link.latency + (comm.size() - 2) * comm.costs().message + bytes * link.byte;
}
double cost_half_ring(const Comm& comm, double bytes) { return cost_ring(comm, bytes) / 2; }
double cost_nccl(const Comm& comm, double bytes) {
  const LinkCosts& gpus = comm.costs().gpus;
  return gpus.latency + 2 * bytes * gpus.byte;
}
// Small data is read from every rank. Of large data, each rank reads what the others have reduced.
double cost_ipc(const Comm& comm, double bytes) {
  const LinkCosts& peers = comm.costs().ipc;
  const double others = comm.size() - 1;
  return std::min(peers.latency + others * bytes * peers.byte,
                  2 * (peers.latency + others / comm.size() * bytes * peers.byte));
}
// Whole vectors at every distance.
double cost_gpu_adasum(const Comm& comm, const LinkCosts& link, double bytes) {
  return steps(comm) * (link.latency + bytes * link.byte);
}
double cost_adasum_nccl(const Comm& comm, double bytes) {
  return cost_gpu_adasum(comm, comm.costs().gpus, bytes);
}
double cost_adasum_ipc(const Comm& comm, double bytes) {
  return cost_gpu_adasum(comm, comm.costs().ipc, bytes);
}
// To the host, through the ranks' host algorithms, and back.
double cost_staged(const Comm& comm, double bytes) {
  const LinkCosts& bus = comm.costs().bus;
  const double there =
      comm.host_memory() != nullptr ? cost_direct(comm, bytes) : cost_ring(comm, bytes);
  return 2 * (bus.latency + bytes * bus.byte) + there;
}

// Not measured. Between the two, because MPI may or may not go through host memory.
double cost_gpu_mpi(const Comm& comm, double bytes) {
  return (cost_nccl(comm, bytes) + cost_staged(comm, bytes)) / 2;
}

// Slices to the host and back, and twice among the GPUs.
double cost_gpu_hierarchical(const Comm& comm, double bytes) {
  const LinkCosts& bus = comm.costs().bus;
  const LinkCosts& devices = comm.gpu()->nccl_in_hosts() ? comm.costs().gpus : comm.costs().ipc;
  return 2 * (devices.latency + bytes * devices.byte) +
         2 * (bus.latency + bytes / comm.local_comm()->size() * bus.byte) +
         cost_between_hosts(comm, bytes);
}

constexpr auto kOnHost = std::to_array<Algorithm>({
    {.kind = OpKind::kAllreduce,
     .name = "lines",
     .medium = "shm",
     .can = fits_into_lines,
     .cost = cost_lines,
     .run = allreduce_lines,
     .defers_writes = true},
    {.kind = OpKind::kAllreduce,
     .name = "direct",
     .medium = "shm",
     .can = elementwise_on_one_host,
     .cost = cost_direct,
     .run = allreduce_direct,
     .defers_writes = true},
    {.kind = OpKind::kAllreduce,
     .name = "pairwise",
     .medium = "stream",
     .can = elementwise,
     .cost = cost_pairwise,
     .run = allreduce_pairwise,
     .defers_writes = true},
    {.kind = OpKind::kAllreduce,
     .name = "ring",
     .medium = "stream",
     .can = elementwise,
     .cost = cost_ring,
     .run = allreduce_ring},
    {.kind = OpKind::kAllreduce,
     .name = "doubling",
     .medium = "stream",
     .can = elementwise,
     .cost = cost_doubling,
     .run = allreduce_doubling,
     .defers_writes = true},
    {.kind = OpKind::kAllreduce,
     .name = "hierarchical",
     .medium = "mixed",
     .can = on_many_hosts,
     .cost = cost_hierarchical,
     .run = allreduce_hierarchical,
     .defers_writes = true},
    {.kind = OpKind::kAllreduce,
     .name = "mpi",
     .medium = "mpi",
     .can = by_mpi,
     .cost = cost_mpi<OpKind::kAllreduce>,
     .run = host_mpi},
    {.kind = OpKind::kAllreduce,
     .name = "adasum_direct",
     .medium = "shm",
     .can = adasum_on_one_host,
     .cost = cost_direct,
     .run = allreduce_adasum_direct,
     .defers_writes = true},
    {.kind = OpKind::kAllreduce,
     .name = "adasum_halving",
     .medium = "stream",
     .can = adasum,
     .cost = cost_halving,
     .run = allreduce_adasum_halving},
    {.kind = OpKind::kAllreduce,
     .name = "adasum_doubling",
     .medium = "stream",
     .can = adasum,
     .cost = cost_doubling,
     .run = allreduce_adasum_doubling},
    {.kind = OpKind::kAllgather,
     .name = "direct",
     .medium = "shm",
     .can = on_one_host,
     .cost = cost_direct,
     .run = allgather_direct,
     .defers_writes = true},
    {.kind = OpKind::kAllgather,
     .name = "ring",
     .medium = "stream",
     .can = always,
     .cost = cost_half_ring,
     .run = allgather_ring},
    {.kind = OpKind::kAllgather,
     .name = "mpi",
     .medium = "mpi",
     .can = by_mpi,
     .cost = cost_mpi<OpKind::kAllgather>,
     .run = host_mpi},
    {.kind = OpKind::kBroadcast,
     .name = "direct",
     .medium = "shm",
     .can = on_one_host,
     .cost = cost_direct,
     .run = broadcast_direct},
    {.kind = OpKind::kBroadcast,
     .name = "tree",
     .medium = "stream",
     .can = always,
     .cost = cost_doubling,
     .run = broadcast_tree},
    {.kind = OpKind::kBroadcast,
     .name = "chain",
     .medium = "stream",
     .can = always,
     .cost = cost_chain,
     .run = broadcast_chain},
    {.kind = OpKind::kBroadcast,
     .name = "mpi",
     .medium = "mpi",
     .can = by_mpi,
     .cost = cost_mpi<OpKind::kBroadcast>,
     .run = host_mpi},
    {.kind = OpKind::kAlltoall,
     .name = "direct",
     .medium = "shm",
     .can = on_one_host,
     .cost = cost_direct,
     .run = alltoall_direct,
     .defers_writes = true},
    {.kind = OpKind::kAlltoall,
     .name = "pairwise",
     .medium = "stream",
     .can = always,
     .cost = cost_half_ring,
     .run = alltoall_pairwise},
    {.kind = OpKind::kAlltoall,
     .name = "mpi",
     .medium = "mpi",
     .can = by_mpi,
     .cost = cost_mpi<OpKind::kAlltoall>,
     .run = host_mpi},
    {.kind = OpKind::kReducescatter,
     .name = "direct",
     .medium = "shm",
     .can = on_one_host,
     .cost = cost_direct,
     .run = reducescatter_direct,
     .defers_writes = true},
    {.kind = OpKind::kReducescatter,
     .name = "ring",
     .medium = "stream",
     .can = always,
     .cost = cost_half_ring,
     .run = reducescatter_ring,
     .defers_writes = true},
    {.kind = OpKind::kReducescatter,
     .name = "mpi",
     .medium = "mpi",
     .can = by_mpi,
     .cost = cost_mpi<OpKind::kReducescatter>,
     .run = host_mpi},
    {.kind = OpKind::kBarrier,
     .name = "direct",
     .medium = "shm",
     .can = on_one_host,
     .cost = cost_direct,
     .run = barrier_direct,
     .defers_writes = true},
    {.kind = OpKind::kBarrier,
     .name = "dissemination",
     .medium = "stream",
     .can = always,
     .cost = cost_doubling,
     .run = barrier_dissemination,
     .defers_writes = true},
    {.kind = OpKind::kBarrier,
     .name = "mpi",
     .medium = "mpi",
     .can = by_mpi,
     .cost = cost_mpi<OpKind::kBarrier>,
     .run = host_mpi},
    {.kind = OpKind::kReduce,
     .name = "direct",
     .medium = "shm",
     .can = on_one_host,
     .cost = cost_direct,
     .run = reduce_direct,
     .defers_writes = true},
    {.kind = OpKind::kReduce,
     .name = "tree",
     .medium = "stream",
     .can = always,
     .cost = cost_doubling,
     .run = reduce_tree},
    {.kind = OpKind::kReduce,
     .name = "chain",
     .medium = "stream",
     .can = always,
     .cost = cost_chain,
     .run = reduce_chain},
    {.kind = OpKind::kGather,
     .name = "direct",
     .medium = "shm",
     .can = on_one_host,
     .cost = cost_direct,
     .run = gather_direct},
    {.kind = OpKind::kGather,
     .name = "linear",
     .medium = "stream",
     .can = always,
     .cost = cost_linear,
     .run = gather_linear},
    {.kind = OpKind::kScatter,
     .name = "direct",
     .medium = "shm",
     .can = on_one_host,
     .cost = cost_direct,
     .run = scatter_direct},
    {.kind = OpKind::kScatter,
     .name = "linear",
     .medium = "stream",
     .can = always,
     .cost = cost_linear,
     .run = scatter_linear},
});

// Rows that every operation has in the same form: without a kind.
constexpr OpKind kCollectives[] = {OpKind::kAllreduce, OpKind::kAllgather,     OpKind::kBroadcast,
                                   OpKind::kAlltoall,  OpKind::kReducescatter, OpKind::kBarrier,
                                   OpKind::kReduce,    OpKind::kGather,        OpKind::kScatter};
constexpr Algorithm kAlone[] = {
    {.name = "copy",
     .medium = "self",
     .can = alone,
     .cost = free_of_charge,
     .run = local_copy,
     .defers_writes = true},
};
constexpr OpKind kGpuCollectives[] = {OpKind::kAllreduce, OpKind::kAllgather, OpKind::kBroadcast,
                                      OpKind::kAlltoall, OpKind::kReducescatter};
constexpr OpKind kRootedCollectives[] = {OpKind::kReduce, OpKind::kGather, OpKind::kScatter};
constexpr Algorithm kGpuWays[] = {
    {.name = "nccl", .medium = "gpu", .can = by_nccl, .cost = cost_nccl, .run = gpu_nccl},
    {.name = "staged", .medium = "gpu", .can = always, .cost = cost_staged, .run = gpu_staged},
    {.name = "copy",
     .medium = "gpu",
     .can = alone,
     .cost = free_of_charge,
     .run = gpu_copy,
     .defers_writes = true},
};
// Rows of collectives without a root.
constexpr Algorithm kGpuOtherWays[] = {
    {.name = "ipc", .medium = "gpu", .can = by_ipc, .cost = cost_ipc, .run = gpu_ipc},
    {.name = "mpi", .medium = "gpu", .can = on_gpu_by_mpi, .cost = cost_gpu_mpi, .run = gpu_mpi},
};
constexpr auto kGpuAllreduces = std::to_array<Algorithm>({
    {.kind = OpKind::kAllreduce,
     .name = "nccl",
     .medium = "gpu",
     .can = adasum_by_nccl,
     .cost = cost_adasum_nccl,
     .run = gpu_adasum_nccl},
    {.kind = OpKind::kAllreduce,
     .name = "ipc",
     .medium = "gpu",
     .can = adasum_by_ipc,
     .cost = cost_adasum_ipc,
     .run = gpu_adasum_ipc},
    {.kind = OpKind::kAllreduce,
     .name = "hierarchical",
     .medium = "gpu",
     .can = by_hosts,
     .cost = cost_gpu_hierarchical,
     .run = gpu_hierarchical},
});

// Each medium, for each kind.
template <std::size_t kKinds, std::size_t kWays>
constexpr auto for_each_kind(const OpKind (&kinds)[kKinds], const Algorithm (&ways)[kWays]) {
  std::array<Algorithm, kKinds * kWays> rows{};
  for (std::size_t i = 0; i < rows.size(); ++i) {
    rows[i] = ways[i % kWays];
    rows[i].kind = kinds[i / kWays];
  }
  return rows;
}

template <std::size_t... kSizes>
constexpr auto joined(const std::array<Algorithm, kSizes>&... lists) {
  std::array<Algorithm, (kSizes + ...)> rows{};
  std::size_t at = 0;
  const auto append = [&](const auto& list) {
    for (const Algorithm& row : list) rows[at++] = row;
  };
  (append(lists), ...);
  return rows;
}

template <std::size_t kCount>
constexpr auto on_gpu(std::array<Algorithm, kCount> rows) {
  for (Algorithm& row : rows) row.on_gpu = true;
  return rows;
}

constexpr auto kAlgorithms =
    joined(kOnHost, for_each_kind(kCollectives, kAlone),
           on_gpu(joined(for_each_kind(kGpuCollectives, kGpuWays),
                         for_each_kind(kGpuCollectives, kGpuOtherWays),
                         for_each_kind(kRootedCollectives, kGpuWays), kGpuAllreduces)));

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
