// The table of algorithms.
#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>

#include "collectives/collective.h"
#include "collectives/cost_models.h"
#include "collectives/requirements.h"

namespace horoplug {
namespace {

using namespace cost_models;
using namespace requirements;

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
     .can = by_partial_sums,
     .cost = cost_ring,
     .run = allreduce_ring},
    {.kind = OpKind::kAllreduce,
     .name = "doubling",
     .medium = "stream",
     .can = by_partial_sums,
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
     .cost = cost_allgather_ring,
     .run = allgather_ring},
    {.kind = OpKind::kAllgather,
     .name = "bruck",
     .medium = "stream",
     .can = always,
     .cost = cost_bruck,
     .run = allgather_bruck,
     .defers_writes = true},
    {.kind = OpKind::kAllgather,
     .name = "hierarchical",
     .medium = "mixed",
     .can = on_many_hosts,
     .cost = cost_allgather_hierarchical,
     .run = allgather_hierarchical,
     .defers_writes = true},
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
     .cost = cost_tree,
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
     .name = "halving",
     .medium = "stream",
     .can = always,
     .cost = cost_reducescatter_halving,
     .run = reducescatter_halving,
     .defers_writes = true},
    {.kind = OpKind::kReducescatter,
     .name = "hierarchical",
     .medium = "mixed",
     .can = on_many_hosts,
     .cost = cost_reducescatter_hierarchical,
     .run = reducescatter_hierarchical,
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
     .cost = cost_tree,
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
    {.name = "staged",
     .medium = "gpu",
     .can = through_host,
     .cost = cost_staged,
     .run = gpu_staged},
    {.name = "copy",
     .medium = "gpu",
     .can = alone_on_gpu,
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
      call.kind == OpKind::kAllreduce && on_even_hosts(comm, call) && !by_nccl(comm, call);
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
