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
    const Cycle cycle(memory);
    co_await cycle.writable();
    for (const Part& part : outgoing) largest = std::max(largest, part.bytes);
    std::memcpy(cycle.slot(), &largest, sizeof largest);
    cycle.arrive(Stage::kPacked);
    co_await cycle.reached(Stage::kPacked);
    for (int rank = 0; rank < memory.size(); ++rank) {
      std::size_t theirs;
      std::memcpy(&theirs, cycle.slot(rank), sizeof theirs);
      largest = std::max(largest, theirs);
    }
    cycle.arrive(Stage::kDone);
  }

  const std::size_t chunk_bytes = round_down_to_lines(Arena::kSlotBytes / ranks);
  for (std::size_t i = 0; i < chunk_count(largest, chunk_bytes); ++i) {
    const Cycle cycle(memory);
    co_await cycle.writable();
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      const Part chunk = chunk_of(outgoing[rank], i, chunk_bytes);
      if (chunk.bytes > 0) {
        std::memcpy(cycle.slot() + rank * chunk_bytes, call.input + chunk.begin, chunk.bytes);
      }
    }
    cycle.arrive(Stage::kPacked);

    co_await cycle.reached(Stage::kPacked);
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      const Part chunk = chunk_of(incoming[rank], i, chunk_bytes);
      if (chunk.bytes > 0) {
        std::memcpy(call.output + chunk.begin,
                    cycle.slot(static_cast<int>(rank)) + me * chunk_bytes, chunk.bytes);
      }
    }
    cycle.arrive(Stage::kDone);
  }
}

}  // namespace horoplug
