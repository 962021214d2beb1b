#include "collectives/cost_models.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "collectives/gpu/gpu_group.h"
#include "collectives/stream/hierarchical.h"

namespace horoplug::cost_models {
namespace {

// The logarithms of numbers of ranks, rounded up and down.
double rounds(double size) { return std::bit_width(static_cast<unsigned>(size) - 1); }
double whole_rounds(double size) { return std::bit_width(static_cast<unsigned>(size)) - 1; }
double steps(const Comm& comm) { return rounds(comm.size()); }

// The barrier that an algorithm needs before it in a plan, unless it defers writes.
double barrier_in_plan(const Comm& comm) {
  return comm.planned() ? steps(comm) * comm.costs().stream.latency : 0;
}

// Receiving and reducing or sending on do not overlap.
constexpr double kIdle = 1.1;

// One pass around a ring of `size` ranks.
double half_ring(const LinkCosts& link, double size, double bytes) {
  return (size - 1) * (link.latency + bytes / size * link.byte);
}

double pairwise(const Costs& costs, double size, double bytes) {
  constexpr double kIncast = 0.01;
  const LinkCosts& link = costs.stream;
  const double others = size - 1;
  return 2 * (link.latency + (others - 1) * costs.message) +
         2 * others / size * bytes * link.byte * (1 + (others - 1) * kIncast);
}

double bruck(const LinkCosts& link, double size, double bytes) {
  return rounds(size) * link.latency + (size - 1) / size * bytes * link.byte * kIdle;
}

double halving(const LinkCosts& link, double size, double bytes) {
  const bool folds = !std::has_single_bit(static_cast<unsigned>(size));
  return whole_rounds(size) * link.latency + (size - 1) / size * bytes * link.byte * kIdle +
         (folds ? 2 * link.latency + bytes * link.byte : 0);
}

// At most distances, all ranks of a host exchange data with other hosts at once.
double bytes_of_host(const Comm& comm, double bytes) {
  return comm.hosts() != nullptr ? comm.hosts()->most() * bytes : bytes;
}

// Whole vectors at every distance.
double cost_gpu_adasum(const Comm& comm, const LinkCosts& link, double bytes) {
  return steps(comm) * (link.latency + bytes * link.byte);
}

}  // namespace

double free_of_charge(const Comm&, double) { return 0; }

double cost_direct(const Comm& comm, double bytes) {
  const LinkCosts& link = comm.costs().shared;
  return 2 * link.latency + 3 * bytes * link.byte;
}

double cost_lines(const Comm& comm, double bytes) {
  const LinkCosts& link = comm.costs().shared;
  return link.latency + comm.size() * bytes * link.byte;
}

double cost_ring(const Comm& comm, double bytes) {
  return 2 * half_ring(comm.costs().stream, comm.size(), bytes);
}

double cost_pairwise(const Comm& comm, double bytes) {
  return pairwise(comm.costs(), comm.size(), bytes);
}

double cost_doubling(const Comm& comm, double bytes) {
  const LinkCosts& link = comm.costs().stream;
  return steps(comm) * (link.latency + bytes * link.byte * kIdle);
}

double cost_between_hosts(const Comm& comm, double bytes) {
  const double hosts = comm.hosts()->hosts();
  return std::min(pairwise(comm.costs(), hosts, bytes),
                  2 * half_ring(comm.costs().stream, hosts, bytes));
}

double cost_hierarchical(const Comm& comm, double bytes) {
  const auto block = static_cast<double>(hierarchical_block(*comm.hosts()));
  const double blocks = std::max(std::ceil(bytes / block), 1.0);
  const double in_memory = 2 * cost_direct(comm, bytes);
  const double between = blocks * cost_between_hosts(comm, bytes / blocks);
  return std::max(in_memory, between) + std::min(in_memory, between) / blocks;
}

double cost_allgather_hierarchical(const Comm& comm, double bytes) {
  const LinkCosts& link = comm.costs().stream;
  const double hosts = comm.hosts()->hosts();
  return cost_direct(comm, bytes) +
         std::min(half_ring(link, hosts, bytes), bruck(link, hosts, bytes));
}

double cost_reducescatter_hierarchical(const Comm& comm, double bytes) {
  const LinkCosts& link = comm.costs().stream;
  const double hosts = comm.hosts()->hosts();
  return cost_direct(comm, bytes) +
         std::min(half_ring(link, hosts, bytes), halving(link, hosts, bytes));
}

double cost_mpi(OpKind kind, const Comm& comm, double bytes) {
  const LinkCosts& own = comm.costs().mpi[static_cast<std::size_t>(kind)];
  return barrier_in_plan(comm) + own.latency + bytes * own.byte;
}

double cost_halving(const Comm& comm, double bytes) {
  const LinkCosts& link = comm.costs().stream;
  const double exchanges = 2 * steps(comm) + steps(comm) * (steps(comm) + 1) / 2;
  return exchanges * link.latency + 2 * (comm.size() - 1) * bytes / comm.size() * link.byte;
}

double cost_chain(const Comm& comm, double bytes) {
  const LinkCosts& link = comm.costs().stream;
  return (comm.size() - 1) * (link.latency + Comm::kChunkBytes * link.byte) + bytes * link.byte;
}

double cost_linear(const Comm& comm, double bytes) {
  const LinkCosts& link = comm.costs().stream;
  return link.latency + (comm.size() - 2) * comm.costs().message + bytes * link.byte;
}

double cost_half_ring(const Comm& comm, double bytes) { return cost_ring(comm, bytes) / 2; }

double cost_allgather_ring(const Comm& comm, double bytes) {
  return barrier_in_plan(comm) + cost_half_ring(comm, bytes);
}

double cost_bruck(const Comm& comm, double bytes) {
  return bruck(comm.costs().stream, comm.size(), bytes_of_host(comm, bytes));
}

double cost_reducescatter_halving(const Comm& comm, double bytes) {
  return halving(comm.costs().stream, comm.size(), bytes_of_host(comm, bytes));
}

double cost_tree(const Comm& comm, double bytes) {
  if (comm.hosts() == nullptr) return cost_doubling(comm, bytes);
  const LinkCosts& link = comm.costs().stream;
  const LinkCosts in_host{comm.costs().message, comm.costs().shared.byte};
  return rounds(comm.hosts()->hosts()) * (link.latency + bytes * link.byte * kIdle) +
         rounds(comm.hosts()->most()) * (in_host.latency + bytes * in_host.byte * kIdle);
}

double cost_nccl(const Comm& comm, double bytes) {
  const LinkCosts& gpus = comm.costs().gpus;
  return gpus.latency + 2 * bytes * gpus.byte;
}

double cost_ipc(const Comm& comm, double bytes) {
  const LinkCosts& peers = comm.costs().ipc;
  const double others = comm.size() - 1;
  return std::min(peers.latency + others * bytes * peers.byte,
                  2 * (peers.latency + others / comm.size() * bytes * peers.byte));
}

double cost_adasum_nccl(const Comm& comm, double bytes) {
  return cost_gpu_adasum(comm, comm.costs().gpus, bytes);
}

double cost_adasum_ipc(const Comm& comm, double bytes) {
  return cost_gpu_adasum(comm, comm.costs().ipc, bytes);
}

double cost_staged(const Comm& comm, double bytes) {
  const LinkCosts& bus = comm.costs().bus;
  const double there =
      comm.host_memory() != nullptr ? cost_direct(comm, bytes) : cost_ring(comm, bytes);
  return 2 * (bus.latency + bytes * bus.byte) + there;
}

double cost_gpu_mpi(const Comm& comm, double bytes) {
  return (cost_nccl(comm, bytes) + cost_staged(comm, bytes)) / 2;
}

double cost_gpu_hierarchical(const Comm& comm, double bytes) {
  const LinkCosts& bus = comm.costs().bus;
  const LinkCosts& devices = comm.gpu()->nccl_in_hosts() ? comm.costs().gpus : comm.costs().ipc;
  return 2 * (devices.latency + bytes * devices.byte) +
         2 * (bus.latency + bytes / comm.local_comm()->size() * bus.byte) +
         cost_between_hosts(comm, bytes);
}

}  // namespace horoplug::cost_models
