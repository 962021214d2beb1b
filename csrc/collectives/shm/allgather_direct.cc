// Allgather in shared memory: every rank copies its data to its slot, and all ranks copy from all
// slots.
#include <cstring>

#include "collectives/collective.h"
#include "collectives/partition.h"

namespace horoplug {

Task allgather_direct(Comm& comm, Call& call) {
  HostMemory& memory = *comm.host_memory();
  const auto me = static_cast<std::size_t>(memory.rank());
  const auto parts = consecutive(call.receive_bytes);
  std::size_t largest = 0;
  for (const Part& part : parts) largest = std::max(largest, part.bytes);

  for (std::size_t i = 0; i < chunk_count(largest, Arena::kSlotBytes); ++i) {
    const std::uint64_t cycle = memory.next_cycle();
    co_await memory.writable(cycle);
    const Part mine = chunk_of({0, parts[me].bytes}, i, Arena::kSlotBytes);
    if (mine.bytes > 0) {
      std::memcpy(memory.slot(memory.rank(), cycle), call.input + mine.begin, mine.bytes);
    }
    memory.arrive(Stage::kPacked, cycle);

    co_await memory.reached(Stage::kPacked, cycle);
    for (std::size_t rank = 0; rank < parts.size(); ++rank) {
      const Part chunk = chunk_of(parts[rank], i, Arena::kSlotBytes);
      if (chunk.bytes > 0) {
        std::memcpy(call.output + chunk.begin, memory.slot(static_cast<int>(rank), cycle),
                    chunk.bytes);
      }
    }
    memory.arrive(Stage::kDone, cycle);
  }
}

}  // namespace horoplug
