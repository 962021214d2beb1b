// Reduce in shared memory: every rank copies its data to its slot and reduces a slice of each chunk
// there, and the root copies the slices.
#include "collectives/collective.h"
#include "collectives/partition.h"

namespace horoplug {
namespace {

constexpr std::size_t kGrain = 64;

}  // namespace

Task reduce_direct(Comm& comm, Call& call) {
  SharedGroup& group = *comm.host_memory();
  Layout& layout = *call.layout;
  const int me = group.rank();
  const Part whole{0, layout.bytes()};
  const std::size_t element = dtype_size(call.dtype);
  for (std::size_t i = 0; i < chunk_count(whole.bytes, Arena::kSlotBytes); ++i) {
    const Part chunk = chunk_of(whole, i, Arena::kSlotBytes);
    const std::uint64_t cycle = group.next_cycle();
    co_await group.writable(cycle);
    layout.pack(chunk.begin, chunk.bytes, group.slot(me, cycle));
    group.arrive(Stage::kPacked, cycle);

    co_await group.reached(Stage::kPacked, cycle);
    const Part slice = even_part(chunk.bytes, group.size(), kGrain, me);
    if (slice.bytes > 0) {
      const auto operands = group.operands();
      for (int rank = 0; rank < group.size(); ++rank) {
        operands[static_cast<std::size_t>(rank)] = group.slot(rank, cycle) + slice.begin;
      }
      call.reduce(group.slot(me, cycle) + slice.begin, operands.data(), group.size(),
                  slice.bytes / element, call.finish);
    }
    group.arrive(Stage::kReduced, cycle);

    if (me == call.root) {
      co_await group.reached(Stage::kReduced, cycle);
      for (int rank = 0; rank < group.size(); ++rank) {
        const Part part = even_part(chunk.bytes, group.size(), kGrain, rank);
        layout.unpack(chunk.begin + part.begin, part.bytes, group.slot(rank, cycle) + part.begin);
      }
    }
    group.arrive(Stage::kDone, cycle);
  }
}

}  // namespace horoplug
