// Alltoall in shared memory: slots hold a chunk for every rank, and each rank copies the chunks
// that are meant for it.
#include <cstring>

#include "base/cache_line.h"
#include "collectives/collective.h"
#include "collectives/partition.h"

namespace horoplug {

Task alltoall_direct(Comm& comm, Call& call) {
  HostMemory& memory = *comm.host_memory();
  const auto ranks = static_cast<std::size_t>(memory.size());
  const auto me = static_cast<std::size_t>(memory.rank());
  const auto outgoing = consecutive(call.send_bytes);
  const auto incoming = consecutive(call.receive_bytes);

  // How many cycles it takes depends on the largest message between any two ranks: a first cycle
  // tells.
  std::size_t largest = 0;
  {
    const std::uint64_t cycle = memory.next_cycle();
    co_await memory.writable(cycle);
    for (const Part& part : outgoing) largest = std::max(largest, part.bytes);
    std::memcpy(memory.slot(memory.rank(), cycle), &largest, sizeof largest);
    memory.arrive(Stage::kPacked, cycle);
    co_await memory.reached(Stage::kPacked, cycle);
    for (int rank = 0; rank < memory.size(); ++rank) {
      std::size_t theirs;
      std::memcpy(&theirs, memory.slot(rank, cycle), sizeof theirs);
      largest = std::max(largest, theirs);
    }
    memory.arrive(Stage::kDone, cycle);
  }

  const std::size_t chunk_bytes = round_down_to_lines(Arena::kSlotBytes / ranks);
  for (std::size_t i = 0; i < chunk_count(largest, chunk_bytes); ++i) {
    const std::uint64_t cycle = memory.next_cycle();
    co_await memory.writable(cycle);
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      const Part chunk = chunk_of(outgoing[rank], i, chunk_bytes);
      if (chunk.bytes > 0) {
        std::memcpy(memory.slot(memory.rank(), cycle) + rank * chunk_bytes,
                    call.input + chunk.begin, chunk.bytes);
      }
    }
    memory.arrive(Stage::kPacked, cycle);

    co_await memory.reached(Stage::kPacked, cycle);
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      const Part chunk = chunk_of(incoming[rank], i, chunk_bytes);
      if (chunk.bytes > 0) {
        std::memcpy(call.output + chunk.begin,
                    memory.slot(static_cast<int>(rank), cycle) + me * chunk_bytes, chunk.bytes);
      }
    }
    memory.arrive(Stage::kDone, cycle);
  }
}

}  // namespace horoplug
