// Barrier in shared memory: a cycle without data.
#include "collectives/collective.h"

namespace horoplug {

Task barrier_direct(Comm& comm, Call&) {
  HostMemory& memory = *comm.host_memory();
  const Cycle cycle(memory);
  co_await cycle.writable();
  cycle.arrive(Stage::kPacked);
  co_await cycle.reached(Stage::kPacked);
  cycle.arrive(Stage::kDone);
}

}  // namespace horoplug
