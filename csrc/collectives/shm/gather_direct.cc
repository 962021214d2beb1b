// Allgather and gather in shared memory: every rank but the root of a gather copies its data to its
// slot, and all ranks, or the root, copy from all slots.
#include <algorithm>
#include <cstring>

#include "collectives/collective.h"
#include "collectives/partition.h"

namespace horoplug {

Task gather_direct(Comm& comm, Call& call) {
  HostMemory& memory = *comm.host_memory();
  const int me = memory.rank();
  const bool to_all = call.kind == OpKind::kAllgather;
  const bool receives = to_all || me == call.root;
  const auto has_slot = [&](int rank) { return to_all || rank != call.root; };
  const auto parts = consecutive(call.receive_bytes);
  const Part& own = parts[static_cast<std::size_t>(me)];
  std::size_t largest = 0;
  for (int rank = 0; rank < memory.size(); ++rank) {
    if (has_slot(rank)) largest = std::max(largest, parts[static_cast<std::size_t>(rank)].bytes);
  }
  if (!has_slot(me) && own.bytes > 0) {
    std::memcpy(call.output + own.begin, call.input, own.bytes);
  }

  for (std::size_t i = 0; i < chunk_count(largest, Arena::kSlotBytes); ++i) {
    const Cycle cycle(memory);
    co_await cycle.writable();
    const Part mine = chunk_of({0, own.bytes}, i, Arena::kSlotBytes);
    if (has_slot(me) && mine.bytes > 0) {
      std::memcpy(cycle.slot(), call.input + mine.begin, mine.bytes);
    }
    cycle.arrive(Stage::kPacked);

    if (receives) {
      co_await cycle.reached(Stage::kPacked);
      for (int rank = 0; rank < memory.size(); ++rank) {
        const Part chunk = chunk_of(parts[static_cast<std::size_t>(rank)], i, Arena::kSlotBytes);
        if (!has_slot(rank) || chunk.bytes == 0) continue;
        std::memcpy(call.output + chunk.begin, cycle.slot(rank), chunk.bytes);
      }
    }
    cycle.arrive(Stage::kDone);
  }
}

}  // namespace horoplug
