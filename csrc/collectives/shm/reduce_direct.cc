// Reduce in shared memory: every rank copies its data to its slot and reduces a slice of each chunk
// there, and the root copies the slices.
#include "base/cache_line.h"
#include "collectives/collective.h"
#include "collectives/partition.h"

namespace horoplug {

Task reduce_direct(Comm& comm, Call& call) {
  HostMemory& memory = *comm.host_memory();
  Layout& layout = *call.layout;
  const int me = memory.rank();
  const Part whole{0, layout.bytes()};
  const std::size_t grain = call.grain();
  for (std::size_t i = 0; i < chunk_count(whole.bytes, Arena::kSlotBytes); ++i) {
    const Part chunk = chunk_of(whole, i, Arena::kSlotBytes);
    const Cycle cycle(memory);
    co_await cycle.writable();
    layout.pack(chunk.begin, chunk.bytes, cycle.slot());
    cycle.arrive(Stage::kPacked);

    co_await cycle.reached(Stage::kPacked);
    const Part slice = even_part(chunk.bytes, memory.size(), kCacheLine, me);
    if (slice.bytes > 0) {
      const auto operands = memory.operands();
      for (int rank = 0; rank < memory.size(); ++rank) {
        operands[static_cast<std::size_t>(rank)] = cycle.slot(rank) + slice.begin;
      }
      call.reduce(cycle.slot() + slice.begin, operands.data(), memory.size(), slice.bytes / grain,
                  call.finish);
    }
    cycle.arrive(Stage::kReduced);

    if (me == call.root) {
      co_await cycle.reached(Stage::kReduced);
      for (int rank = 0; rank < memory.size(); ++rank) {
        const Part part = even_part(chunk.bytes, memory.size(), kCacheLine, rank);
        layout.unpack(chunk.begin + part.begin, part.bytes, cycle.slot(rank) + part.begin);
      }
    }
    cycle.arrive(Stage::kDone);
  }
}

}  // namespace horoplug
