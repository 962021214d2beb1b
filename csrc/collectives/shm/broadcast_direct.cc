// Broadcast in shared memory: the root copies its data to its slot, and all ranks copy it from
// there.
#include "collectives/collective.h"
#include "collectives/partition.h"

namespace horoplug {

Task broadcast_direct(Comm& comm, Call& call) {
  HostMemory& memory = *comm.host_memory();
  Layout& layout = *call.layout;
  const Part whole{0, layout.bytes()};
  for (std::size_t i = 0; i < chunk_count(whole.bytes, Arena::kSlotBytes); ++i) {
    const Part chunk = chunk_of(whole, i, Arena::kSlotBytes);
    const Cycle cycle(memory);
    co_await cycle.writable();
    std::byte* const shown = cycle.slot(call.root);
    if (memory.rank() == call.root) layout.pack(chunk.begin, chunk.bytes, shown);
    cycle.arrive(Stage::kPacked);

    co_await cycle.reached_by(call.root, Stage::kPacked);
    layout.unpack(chunk.begin, chunk.bytes, shown);
    cycle.arrive(Stage::kDone);
  }
}

}  // namespace horoplug
