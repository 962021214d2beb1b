// Allreduce in shared memory: every rank copies its input into its slot, reduces its part of it
// straight from everybody's slots, and copies the result from where its peers have reduced it.
//
// The copy in is the packing of the fused tensors and the copy out their unpacking. Operands are
// combined in rank order with float32 accumulation for 16-bit floats, by one rank for each element:
// all ranks get the same bits.
#include "collectives/collective.h"
#include "collectives/partition.h"

namespace horoplug {
namespace {

// Up to here every rank reduces the whole buffer for itself: more arithmetic, but one meeting of
// the ranks less.
constexpr std::size_t kOneShotBytes = 8 * 1024;
// Parts begin on cache lines, so that no line is written by two ranks.
constexpr std::size_t kGrain = 64;

std::vector<const void*> places(const SharedGroup& group, std::uint64_t cycle, std::size_t at) {
  std::vector<const void*> sources(static_cast<std::size_t>(group.size()));
  for (int rank = 0; rank < group.size(); ++rank) {
    sources[static_cast<std::size_t>(rank)] = group.slot(rank, cycle) + at;
  }
  return sources;
}

Task one_shot(Comm& comm, Call& call) {
  SharedGroup& group = *comm.shared();
  Layout& layout = *call.layout;
  const std::uint64_t cycle = group.next_cycle();

  co_await group.writable(cycle);
  layout.pack(0, layout.bytes(), group.slot(group.rank(), cycle));
  group.arrive(Stage::kPacked, cycle);

  co_await group.reached(Stage::kPacked, cycle);
  const auto sources = places(group, cycle, 0);
  std::byte* result = layout.contiguous_output();
  if (result == nullptr) result = comm.scratch(Scratch::kWork, layout.bytes());
  call.reduce(result, sources.data(), group.size(), layout.elements(), call.finish);
  group.arrive(Stage::kDone, cycle);
  layout.unpack(0, layout.bytes(), result);
}

}  // namespace

Task allreduce_direct(Comm& comm, Call& call) {
  Layout& layout = *call.layout;
  if (layout.bytes() <= kOneShotBytes) {
    co_await one_shot(comm, call);
    co_return;
  }
  SharedGroup& group = *comm.shared();
  const int me = group.rank();
  const std::size_t element = dtype_size(call.dtype);
  const Part whole{0, layout.bytes()};
  const std::size_t cycles = chunk_count(whole.bytes, Arena::kSlotBytes);

  // Packing runs one cycle ahead: peers that are still at it can be waited for with work done.
  std::uint64_t packed_cycle = group.next_cycle();
  co_await group.writable(packed_cycle);
  const Part first = chunk_of(whole, 0, Arena::kSlotBytes);
  layout.pack(first.begin, first.bytes, group.slot(me, packed_cycle));
  group.arrive(Stage::kPacked, packed_cycle);

  for (std::size_t i = 0; i < cycles; ++i) {
    const std::uint64_t cycle = packed_cycle;
    const Part chunk = chunk_of(whole, i, Arena::kSlotBytes);
    if (i + 1 < cycles) {
      const Part next = chunk_of(whole, i + 1, Arena::kSlotBytes);
      packed_cycle = group.next_cycle();
      co_await group.writable(packed_cycle);
      layout.pack(next.begin, next.bytes, group.slot(me, packed_cycle));
      group.arrive(Stage::kPacked, packed_cycle);
    }

    co_await group.reached(Stage::kPacked, cycle);
    const auto parts = split_evenly(chunk.bytes, group.size(), kGrain);
    const Part& mine = parts[static_cast<std::size_t>(me)];
    const auto sources = places(group, cycle, mine.begin);
    // In place: nobody else reads this rank's input to its own part.
    call.reduce(group.slot(me, cycle) + mine.begin, sources.data(), group.size(),
                mine.bytes / element, call.finish);
    group.arrive(Stage::kReduced, cycle);

    co_await group.reached(Stage::kReduced, cycle);
    for (int rank = 0; rank < group.size(); ++rank) {
      const Part& part = parts[static_cast<std::size_t>(rank)];
      layout.unpack(chunk.begin + part.begin, part.bytes, group.slot(rank, cycle) + part.begin);
    }
    group.arrive(Stage::kDone, cycle);
  }
}

}  // namespace horoplug
