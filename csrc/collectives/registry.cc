// The table of algorithms.
#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "collectives/collective.h"
#include "collectives/cost_models.h"
#include "collectives/requirements.h"

namespace horoplug {
namespace {

using namespace cost_models;
using namespace requirements;

// The fields of Algorithm, in their order.
constexpr bool kDefersWrites = true;
constexpr auto kOnCpu = std::to_array<Algorithm>({
    {OpKind::kAllreduce, "lines", "shm", fits_into_lines, cost_lines, allreduce_lines,
     kDefersWrites},
    {OpKind::kAllreduce, "direct", "shm", elementwise_on_one_host, cost_direct, allreduce_direct,
     kDefersWrites},
    {OpKind::kAllreduce, "pairwise", "stream", elementwise, cost_pairwise, allreduce_pairwise,
     kDefersWrites},
    {OpKind::kAllreduce, "ring", "stream", by_partial_sums, cost_ring, allreduce_ring},
    {OpKind::kAllreduce, "doubling", "stream", by_partial_sums, cost_doubling, allreduce_doubling,
     kDefersWrites},
    {OpKind::kAllreduce, "hierarchical", "mixed", on_many_hosts, cost_hierarchical,
     allreduce_hierarchical, kDefersWrites},
    {OpKind::kAllreduce, "mpi", "mpi", by_mpi, cost_mpi<OpKind::kAllreduce>, cpu_mpi},
    {OpKind::kAllreduce, "adasum_direct", "shm", adasum_on_one_host, cost_direct,
     allreduce_adasum_direct, kDefersWrites},
    {OpKind::kAllreduce, "adasum_halving", "stream", adasum, cost_halving,
     allreduce_adasum_halving},
    {OpKind::kAllreduce, "adasum_doubling", "stream", adasum, cost_doubling,
     allreduce_adasum_doubling},
    {OpKind::kAllgather, "direct", "shm", on_one_host, cost_direct, gather_direct, kDefersWrites},
    {OpKind::kAllgather, "ring", "stream", has_peers, cost_allgather_ring, allgather_ring},
    {OpKind::kAllgather, "bruck", "stream", has_peers, cost_bruck, allgather_bruck, kDefersWrites},
    {OpKind::kAllgather, "hierarchical", "mixed", on_many_hosts, cost_allgather_hierarchical,
     allgather_hierarchical, kDefersWrites},
    {OpKind::kAllgather, "mpi", "mpi", by_mpi, cost_mpi<OpKind::kAllgather>, cpu_mpi},
    {OpKind::kBroadcast, "direct", "shm", on_one_host, cost_direct, broadcast_direct},
    {OpKind::kBroadcast, "tree", "stream", has_peers, cost_tree, broadcast_tree},
    {OpKind::kBroadcast, "chain", "stream", has_peers, cost_chain, broadcast_chain},
    {OpKind::kBroadcast, "mpi", "mpi", by_mpi, cost_mpi<OpKind::kBroadcast>, cpu_mpi},
    {OpKind::kAlltoall, "direct", "shm", on_one_host, cost_direct, alltoall_direct, kDefersWrites},
    {OpKind::kAlltoall, "pairwise", "stream", has_peers, cost_half_ring, alltoall_pairwise},
    {OpKind::kAlltoall, "mpi", "mpi", by_mpi, cost_mpi<OpKind::kAlltoall>, cpu_mpi},
    {OpKind::kReducescatter, "direct", "shm", on_one_host, cost_direct, reducescatter_direct,
     kDefersWrites},
    {OpKind::kReducescatter, "ring", "stream", has_peers, cost_half_ring, reducescatter_ring,
     kDefersWrites},
    {OpKind::kReducescatter, "halving", "stream", has_peers, cost_reducescatter_halving,
     reducescatter_halving, kDefersWrites},
    {OpKind::kReducescatter, "hierarchical", "mixed", on_many_hosts,
     cost_reducescatter_hierarchical, reducescatter_hierarchical, kDefersWrites},
    {OpKind::kReducescatter, "mpi", "mpi", by_mpi, cost_mpi<OpKind::kReducescatter>, cpu_mpi},
    {OpKind::kBarrier, "direct", "shm", on_one_host, cost_direct, barrier_direct, kDefersWrites},
    {OpKind::kBarrier, "dissemination", "stream", has_peers, cost_doubling, barrier_dissemination,
     kDefersWrites},
    {OpKind::kBarrier, "mpi", "mpi", by_mpi, cost_mpi<OpKind::kBarrier>, cpu_mpi},
    {OpKind::kReduce, "direct", "shm", on_one_host, cost_direct, reduce_direct, kDefersWrites},
    {OpKind::kReduce, "tree", "stream", has_peers, cost_tree, reduce_tree},
    {OpKind::kReduce, "chain", "stream", has_peers, cost_chain, reduce_chain},
    {OpKind::kGather, "direct", "shm", on_one_host, cost_direct, gather_direct},
    {OpKind::kGather, "linear", "stream", has_peers, cost_linear, gather_linear},
    {OpKind::kScatter, "direct", "shm", on_one_host, cost_direct, scatter_direct},
    {OpKind::kScatter, "linear", "stream", has_peers, cost_linear, scatter_linear},
});

// Rows that every operation has in the same form: without a kind.
constexpr OpKind kCollectives[] = {OpKind::kAllreduce, OpKind::kAllgather,     OpKind::kBroadcast,
                                   OpKind::kAlltoall,  OpKind::kReducescatter, OpKind::kBarrier,
                                   OpKind::kReduce,    OpKind::kGather,        OpKind::kScatter};
constexpr Algorithm kAlone[] = {
    {{}, "copy", "self", alone, free_of_charge, local_copy, kDefersWrites}};
constexpr OpKind kGpuCollectives[] = {OpKind::kAllreduce, OpKind::kAllgather, OpKind::kBroadcast,
                                      OpKind::kAlltoall, OpKind::kReducescatter};
constexpr OpKind kRootedCollectives[] = {OpKind::kReduce, OpKind::kGather, OpKind::kScatter};
constexpr Algorithm kGpuWays[] = {
    {{}, "nccl", "gpu", by_nccl, cost_nccl, gpu_nccl},
    {{}, "staged", "gpu", through_cpu, cost_staged, gpu_staged},
    {{}, "copy", "gpu", alone_on_gpu, free_of_charge, gpu_copy, kDefersWrites},
};
// Rows of collectives without a root.
constexpr Algorithm kGpuOtherWays[] = {
    {{}, "ipc", "gpu", by_ipc, cost_ipc, gpu_ipc},
    {{}, "mpi", "gpu", on_gpu_by_mpi, cost_gpu_mpi, gpu_mpi},
};
constexpr auto kGpuAllreduces = std::to_array<Algorithm>({
    {OpKind::kAllreduce, "nccl", "gpu", adasum_by_nccl, cost_adasum_nccl, gpu_adasum_nccl},
    {OpKind::kAllreduce, "ipc", "gpu", adasum_by_ipc, cost_adasum_ipc, gpu_adasum_ipc},
    {OpKind::kAllreduce, "hierarchical", "gpu", by_hosts, cost_gpu_hierarchical, gpu_hierarchical},
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
    joined(kOnCpu, for_each_kind(kCollectives, kAlone),
           on_gpu(joined(for_each_kind(kGpuCollectives, kGpuWays),
                         for_each_kind(kGpuCollectives, kGpuOtherWays),
                         for_each_kind(kRootedCollectives, kGpuWays), kGpuAllreduces)));

using Rows = std::vector<const Algorithm*>;

// The rows of a kind, in the order of the table: small operations are chosen for so often that
// looking at all rows would be a large part of their time.
const Rows& rows_of(OpKind kind, bool is_on_gpu) {
  static const auto by_kind = [] {
    std::array<std::array<Rows, 2>, kOpKindCount> rows;
    for (const Algorithm& row : kAlgorithms) {
      rows[static_cast<std::size_t>(row.kind)][row.on_gpu ? 1 : 0].push_back(&row);
    }
    return rows;
  }();
  return by_kind[static_cast<std::size_t>(kind)][is_on_gpu ? 1 : 0];
}

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
  const auto bytes = static_cast<double>(call.bytes());
  for (const Algorithm* candidate : rows_of(call.kind, call.on_gpu)) {
    if (!candidate->can(comm, call)) continue;
    if (forced != nullptr && std::strcmp(candidate->name, forced) == 0) return *candidate;
    const double cost = candidate->cost(comm, bytes);
    if (best == nullptr || cost < best_cost) {
      best = candidate;
      best_cost = cost;
    }
  }
  if (best == nullptr) throw std::logic_error("no algorithm");
  return *best;
}

}  // namespace horoplug
