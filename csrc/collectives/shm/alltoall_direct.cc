// Alltoall in shared memory: slots hold a chunk for every rank, and each rank copies what is meant
// for it.
#include <cstring>

#include "collectives/collective.h"
#include "collectives/partition.h"

namespace horoplug {

Task alltoall_direct(Comm& comm, Call& call) {
  SharedGroup& group = *comm.host_memory();
  const auto ranks = static_cast<std::size_t>(group.size());
  const auto me = static_cast<std::size_t>(group.rank());
  const auto outgoing = consecutive(call.send_bytes);
  const auto incoming = consecutive(call.receive_bytes);

  // How many cycles it takes depends on the largest message between any two ranks: a first cycle
  // tells.
  std::size_t largest = 0;
  {
    const std::uint64_t cycle = group.next_cycle();
    co_await group.writable(cycle);
    for (const Part& part : outgoing) largest = std::max(largest, part.bytes);
    std::memcpy(group.slot(group.rank(), cycle), &largest, sizeof largest);
    group.arrive(Stage::kPacked, cycle);
    co_await group.reached(Stage::kPacked, cycle);
    for (int rank = 0; rank < group.size(); ++rank) {
      std::size_t theirs;
      std::memcpy(&theirs, group.slot(rank, cycle), sizeof theirs);
      largest = std::max(largest, theirs);
    }
    group.arrive(Stage::kDone, cycle);
  }

  const std::size_t chunk_bytes = Arena::kSlotBytes / ranks / 64 * 64;
  for (std::size_t i = 0; i < chunk_count(largest, chunk_bytes); ++i) {
    const std::uint64_t cycle = group.next_cycle();
    co_await group.writable(cycle);
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      const Part chunk = chunk_of(outgoing[rank], i, chunk_bytes);
      if (chunk.bytes > 0) {
        std::memcpy(group.slot(group.rank(), cycle) + rank * chunk_bytes, call.input + chunk.begin,
                    chunk.bytes);
      }
    }
    group.arrive(Stage::kPacked, cycle);

    co_await group.reached(Stage::kPacked, cycle);
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      const Part chunk = chunk_of(incoming[rank], i, chunk_bytes);
      if (chunk.bytes > 0) {
        std::memcpy(call.output + chunk.begin,
                    group.slot(static_cast<int>(rank), cycle) + me * chunk_bytes, chunk.bytes);
      }
    }
    group.arrive(Stage::kDone, cycle);
  }
}

}  // namespace horoplug
