// Barrier in shared memory: a cycle without data.
#include "collectives/collective.h"

namespace horoplug {

Task barrier_direct(Comm& comm, Call&) {
  SharedGroup& group = *comm.host_memory();
  const std::uint64_t cycle = group.next_cycle();
  co_await group.writable(cycle);
  group.arrive(Stage::kPacked, cycle);
  co_await group.reached(Stage::kPacked, cycle);
  group.arrive(Stage::kDone, cycle);
}

}  // namespace horoplug
