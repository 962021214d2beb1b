// The pass around a ring that allreduce, reducescatter and allgather share.
//
// The buffer is cut into one part per rank. A rank starts by sending part `first` to the next rank;
// in step s it receives part first - s - 1 from the previous one, combines it with its own or takes
// it as it is, and, except in the last step, sends it on. Parts travel in chunks, several of them
// in flight: one is reduced while others are received and sent (Patarasuk and Yuan, "Bandwidth
// optimal all-reduce algorithms for clusters of workstations", 2009).
#pragma once

#include <span>

#include "collectives/collective.h"
#include "collectives/partition.h"

namespace horoplug {

struct RingPass {
  std::byte* buffer;
  std::span<const Part> parts;
  int first;         // part that this rank sends first
  int reduce_steps;  // steps that combine: size - 1, or 0
  int steps;         // all steps: size - 1, or twice that
};

// The last combining step also applies call.finish.
Task ring_pass(Comm& comm, const Call& call, RingPass pass);

}  // namespace horoplug
