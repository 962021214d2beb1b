// Scatter in shared memory: the root's slot holds a chunk for every rank, and each rank copies its
// own.
#include <algorithm>
#include <cstring>

#include "base/cache_line.h"
#include "collectives/collective.h"
#include "collectives/partition.h"

namespace horoplug {

Task scatter_direct(Comm& comm, Call& call) {
  HostMemory& memory = *comm.host_memory();
  const bool is_root = memory.rank() == call.root;
  const auto ranks = static_cast<std::size_t>(memory.size());
  const auto me = static_cast<std::size_t>(memory.rank());
  const auto parts = consecutive(call.receive_bytes);
  const std::size_t chunk_bytes = round_down_to_lines(Arena::kSlotBytes / ranks);
  std::size_t largest = 0;
  for (std::size_t rank = 0; rank < parts.size(); ++rank) {
    if (static_cast<int>(rank) != call.root) largest = std::max(largest, parts[rank].bytes);
  }
  if (is_root && parts[me].bytes > 0) {
    std::memcpy(call.output, call.input + parts[me].begin, parts[me].bytes);
  }

  for (std::size_t i = 0; i < chunk_count(largest, chunk_bytes); ++i) {
    const Cycle cycle(memory);
    co_await cycle.writable();
    std::byte* const shown = cycle.slot(call.root);
    for (std::size_t rank = 0; is_root && rank < ranks; ++rank) {
      const Part chunk = chunk_of(parts[rank], i, chunk_bytes);
      if (rank == me || chunk.bytes == 0) continue;
      std::memcpy(shown + rank * chunk_bytes, call.input + chunk.begin, chunk.bytes);
    }
    cycle.arrive(Stage::kPacked);

    if (!is_root) {
      co_await cycle.reached_by(call.root, Stage::kPacked);
      const Part mine = chunk_of({0, parts[me].bytes}, i, chunk_bytes);
      if (mine.bytes > 0) {
        std::memcpy(call.output + mine.begin, shown + me * chunk_bytes, mine.bytes);
      }
    }
    cycle.arrive(Stage::kDone);
  }
}

}  // namespace horoplug
