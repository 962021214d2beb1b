// The estimated durations of algorithms in microseconds, from a latency for each message and a time
// for each byte: the column `cost` of the table of algorithms. They may depend only on what all
// ranks know alike.
#pragma once

#include "collectives/collective.h"

namespace horoplug::cost_models {

double free_of_charge(const Comm& comm, double bytes);
double cost_direct(const Comm& comm, double bytes);
// Every rank reads the whole data of all ranks.
double cost_lines(const Comm& comm, double bytes);
double cost_ring(const Comm& comm, double bytes);
// Flows from many hosts slow each other down, increasingly with the number of hosts.
double cost_pairwise(const Comm& comm, double bytes);
// Receiving and reducing do not overlap, nor do reducing and sending.
double cost_doubling(const Comm& comm, double bytes);
// Each rank of a host sends its slice over the host's link.
double cost_between_hosts(const Comm& comm, double bytes);
// Through shared memory twice, which overlaps with the network if there are several blocks.
double cost_hierarchical(const Comm& comm, double bytes);
// Once through shared memory, and by the cheaper algorithm between hosts.
double cost_allgather_hierarchical(const Comm& comm, double bytes);
double cost_reducescatter_hierarchical(const Comm& comm, double bytes);
// Between the hosts first, then within each.
double cost_tree(const Comm& comm, double bytes);
// As measured. In a plan, an algorithm that does not defer writes needs a barrier first.
double cost_mpi(OpKind kind, const Comm& comm, double bytes);
template <OpKind kind>
double cost_mpi(const Comm& comm, double bytes) {
  return cost_mpi(kind, comm, bytes);
}
// The halving exchanges, their reverse, and the sums of dot products: one further exchange at every
// distance.
double cost_halving(const Comm& comm, double bytes);
double cost_chain(const Comm& comm, double bytes);
// All data crosses the root's link.
double cost_linear(const Comm& comm, double bytes);
double cost_half_ring(const Comm& comm, double bytes);
// In a plan, it needs a barrier first, because it does not defer writes.
double cost_allgather_ring(const Comm& comm, double bytes);
// As many bytes as around a ring in fewer rounds, but through a buffer. At most distances, all
// ranks of a host send to other hosts at once.
double cost_bruck(const Comm& comm, double bytes);
// The same rounds in reverse order. Ranks beyond the largest power of two add one before and one
// after them.
double cost_reducescatter_halving(const Comm& comm, double bytes);
double cost_nccl(const Comm& comm, double bytes);
// Small data is read from every rank. Of large data, each rank reads what the others have reduced.
double cost_ipc(const Comm& comm, double bytes);
double cost_adasum_nccl(const Comm& comm, double bytes);
double cost_adasum_ipc(const Comm& comm, double bytes);
// To the CPU, through the algorithms for CPU tensors, and back.
double cost_staged(const Comm& comm, double bytes);
// Not measured. Between the costs of NCCL and staging, because MPI may or may not go through the
// CPU's memory.
double cost_gpu_mpi(const Comm& comm, double bytes);
// Slices to the CPU and back, and twice among the GPUs.
double cost_gpu_hierarchical(const Comm& comm, double bytes);

}  // namespace horoplug::cost_models
