// Gather in shared memory: every rank copies its data to its slot, and the root copies from all
// slots.
#include <algorithm>
#include <cstring>

#include "collectives/collective.h"
#include "collectives/partition.h"

namespace horoplug {

Task gather_direct(Comm& comm, Call& call) {
  HostMemory& memory = *comm.host_memory();
  const bool is_root = memory.rank() == call.root;
  const auto parts = consecutive(call.receive_bytes);
  const Part& own = parts[static_cast<std::size_t>(memory.rank())];
  std::size_t largest = 0;
  for (std::size_t rank = 0; rank < parts.size(); ++rank) {
    if (static_cast<int>(rank) != call.root) largest = std::max(largest, parts[rank].bytes);
  }
  if (is_root && own.bytes > 0) std::memcpy(call.output + own.begin, call.input, own.bytes);

  for (std::size_t i = 0; i < chunk_count(largest, Arena::kSlotBytes); ++i) {
    const std::uint64_t cycle = memory.next_cycle();
    co_await memory.writable(cycle);
    const Part mine = chunk_of({0, own.bytes}, i, Arena::kSlotBytes);
    if (!is_root && mine.bytes > 0) {
      std::memcpy(memory.slot(memory.rank(), cycle), call.input + mine.begin, mine.bytes);
    }
    memory.arrive(Stage::kPacked, cycle);

    if (is_root) {
      co_await memory.reached(Stage::kPacked, cycle);
      for (int rank = 0; rank < memory.size(); ++rank) {
        const Part chunk = chunk_of(parts[static_cast<std::size_t>(rank)], i, Arena::kSlotBytes);
        if (rank == call.root || chunk.bytes == 0) continue;
        std::memcpy(call.output + chunk.begin, memory.slot(rank, cycle), chunk.bytes);
      }
    }
    memory.arrive(Stage::kDone, cycle);
  }
}

}  // namespace horoplug
