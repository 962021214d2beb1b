// Reduce-scatter in shared memory: slots hold a chunk for every rank, and each rank reduces its own
// into its output.
#include "base/cache_line.h"
#include "collectives/collective.h"
#include "collectives/partition.h"

namespace horoplug {

Task reducescatter_direct(Comm& comm, Call& call) {
  HostMemory& memory = *comm.host_memory();
  Layout& layout = *call.layout;
  const auto ranks = static_cast<std::size_t>(memory.size());
  const auto me = static_cast<std::size_t>(memory.rank());
  const std::size_t grain = call.grain();
  const auto parts = consecutive(call.receive_bytes);
  const std::size_t chunk_bytes = round_down_to_lines(Arena::kSlotBytes / ranks);
  std::size_t largest = 0;
  for (const Part& part : parts) largest = std::max(largest, part.bytes);

  for (std::size_t i = 0; i < chunk_count(largest, chunk_bytes); ++i) {
    const Cycle cycle(memory);
    co_await cycle.writable();
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      const Part chunk = chunk_of(parts[rank], i, chunk_bytes);
      layout.pack(chunk.begin, chunk.bytes, cycle.slot() + rank * chunk_bytes);
    }
    cycle.arrive(Stage::kPacked);

    co_await cycle.reached(Stage::kPacked);
    const Part mine = chunk_of(parts[me], i, chunk_bytes);
    if (mine.bytes > 0) {
      std::vector<const void*> sources(ranks);
      for (std::size_t rank = 0; rank < ranks; ++rank) {
        sources[rank] = cycle.slot(static_cast<int>(rank)) + me * chunk_bytes;
      }
      call.reduce(call.output + i * chunk_bytes, sources.data(), memory.size(), mine.bytes / grain,
                  call.finish);
    }
    cycle.arrive(Stage::kDone);
  }
}

}  // namespace horoplug
