// Barrier in shared memory: a cycle without data.
#include "collectives/collective.h"

namespace horoplug {

Task barrier_direct(Comm& comm, Call&) {
  HostMemory& memory = *comm.host_memory();
  const std::uint64_t cycle = memory.next_cycle();
  co_await memory.writable(cycle);
  memory.arrive(Stage::kPacked, cycle);
  co_await memory.reached(Stage::kPacked, cycle);
  memory.arrive(Stage::kDone, cycle);
}

}  // namespace horoplug
