// The table of algorithms.
#include <bit>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "collectives/collective.h"

namespace horoplug {
namespace {

// Cost model: microseconds per message and per byte. For streams only the ratio counts: a message
// costs about as much as 64 KiB of payload. Shared memory is so much cheaper that it is chosen
// wherever there is some.
constexpr double kStreamLatency = 20.0;
constexpr double kStreamByte = 1.0 / 3000.0;
constexpr double kSharedLatency = 1.0;
constexpr double kSharedByte = 1.0 / 20000.0;

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

double free_of_charge(int, double) { return 0; }
double steps(int ranks) { return std::ceil(std::log2(ranks)); }
double cost_direct(int, double bytes) { return 2 * kSharedLatency + 3 * bytes * kSharedByte; }
// Every rank reads all of everybody's.
double cost_lines(int ranks, double bytes) { return kSharedLatency + ranks * bytes * kSharedByte; }
double cost_ring(int ranks, double bytes) {
  return 2 * (ranks - 1) * (kStreamLatency + bytes / ranks * kStreamByte);
}
double cost_doubling(int ranks, double bytes) {
  return steps(ranks) * (kStreamLatency + bytes * kStreamByte);
}
// Halvings and their way back, and the sums of dot products: one exchange more at every distance.
double cost_halving(int ranks, double bytes) {
  const double exchanges = 2 * steps(ranks) + steps(ranks) * (steps(ranks) + 1) / 2;
  return exchanges * kStreamLatency + 2 * (ranks - 1) * bytes / ranks * kStreamByte;
}
double cost_tree(int ranks, double bytes) {
  return steps(ranks) * (kStreamLatency + bytes * kStreamByte);
}
double cost_chain(int ranks, double bytes) {
  return (ranks - 1) * (kStreamLatency + Comm::kChunkBytes * kStreamByte) + bytes * kStreamByte;
}
double cost_half_ring(int ranks, double bytes) {
  return (ranks - 1) * (kStreamLatency + bytes / ranks * kStreamByte);
}

constexpr Algorithm kAlgorithms[] = {
    {OpKind::kAllreduce, "lines", "shm", true, fits_into_lines, cost_lines, allreduce_lines},
    {OpKind::kAllreduce, "direct", "shm", true, elementwise_on_one_host, cost_direct,
     allreduce_direct},
    {OpKind::kAllreduce, "ring", "stream", false, elementwise, cost_ring, allreduce_ring},
    {OpKind::kAllreduce, "doubling", "stream", false, elementwise, cost_doubling,
     allreduce_doubling},
    {OpKind::kAllreduce, "adasum_direct", "shm", true, adasum_on_one_host, cost_direct,
     allreduce_adasum_direct},
    {OpKind::kAllreduce, "adasum_halving", "stream", false, adasum, cost_halving,
     allreduce_adasum_halving},
    {OpKind::kAllreduce, "adasum_doubling", "stream", false, adasum, cost_doubling,
     allreduce_adasum_doubling},
    {OpKind::kAllreduce, "copy", "self", true, alone, free_of_charge, local_copy},
    {OpKind::kAllgather, "direct", "shm", true, on_one_host, cost_direct, allgather_direct},
    {OpKind::kAllgather, "ring", "stream", true, always, cost_half_ring, allgather_ring},
    {OpKind::kAllgather, "copy", "self", true, alone, free_of_charge, local_copy},
    {OpKind::kBroadcast, "direct", "shm", false, on_one_host, cost_direct, broadcast_direct},
    {OpKind::kBroadcast, "tree", "stream", false, always, cost_tree, broadcast_tree},
    {OpKind::kBroadcast, "chain", "stream", false, always, cost_chain, broadcast_chain},
    {OpKind::kBroadcast, "copy", "self", false, alone, free_of_charge, local_copy},
    {OpKind::kAlltoall, "direct", "shm", true, on_one_host, cost_direct, alltoall_direct},
    {OpKind::kAlltoall, "pairwise", "stream", true, always, cost_half_ring, alltoall_pairwise},
    {OpKind::kAlltoall, "copy", "self", true, alone, free_of_charge, local_copy},
    {OpKind::kReducescatter, "direct", "shm", true, on_one_host, cost_direct, reducescatter_direct},
    {OpKind::kReducescatter, "ring", "stream", true, always, cost_half_ring, reducescatter_ring},
    {OpKind::kReducescatter, "copy", "self", true, alone, free_of_charge, local_copy},
    {OpKind::kBarrier, "direct", "shm", true, on_one_host, cost_direct, barrier_direct},
    {OpKind::kBarrier, "dissemination", "stream", true, always, cost_doubling,
     barrier_dissemination},
    {OpKind::kBarrier, "copy", "self", true, alone, free_of_charge, local_copy},
};

}  // namespace

std::span<const Algorithm> algorithms() { return kAlgorithms; }

std::size_t Call::bytes() const {
  if (layout != nullptr) return layout->bytes();
  // What a rank sends in an alltoall is its own affair; only the number of ranks is common
  // knowledge.
  if (kind == OpKind::kAlltoall) return 0;
  std::size_t sum = 0;
  for (const std::size_t part : receive_bytes) sum += part;
  return sum;
}

const Algorithm& choose_algorithm(const Comm& comm, const Call& call, const char* forced) {
  const Algorithm* best = nullptr;
  double best_cost = 0;
  for (const Algorithm& candidate : kAlgorithms) {
    if (candidate.kind != call.kind || !candidate.can(comm, call)) continue;
    if (forced != nullptr && std::strcmp(candidate.name, forced) == 0) return candidate;
    const double cost = candidate.cost(comm.size(), static_cast<double>(call.bytes()));
    if (best == nullptr || cost < best_cost) {
      best = &candidate;
      best_cost = cost;
    }
  }
  if (best == nullptr) throw std::logic_error("no algorithm");
  return *best;
}

}  // namespace horoplug
