// Reduce-scatter over several hosts. The ranks of a host reduce in shared memory what goes to the
// ranks with their local rank on all hosts. Ranks with the same local rank, one per host, then
// reduce-scatter these sums between the hosts, all local ranks at once, so that a host's link
// carries the data once instead of once per rank. (The first half of the two-dimensional allreduce
// of Mikami et al., "Massively distributed SGD: ImageNet/ResNet-50 training in a flash", 2018.)
//
// Where hosts have different numbers of ranks, ranks without a partner on every host get their
// parts from a rank of their host that has one.
#include <cstring>

#include "base/cache_line.h"
#include "collectives/stream/hierarchical.h"

namespace horoplug {
namespace {

// Packs a range of a slice of this rank's input.
void pack(const SlicedCall& of, const PartsOfSlice& slice, const Part& range, std::byte* to) {
  slice.for_each(range, [&](std::size_t from, std::size_t at, std::size_t bytes) {
    of.call.layout->pack(from, bytes, to + at);
  });
}

// Reduces this rank's slice of its host's inputs. Slots hold a chunk of every slice. At least one
// cycle: a rank whose slice is empty waits for the others, too.
Task reduce_in_host(const SlicedCall& of, std::byte* sums) {
  if (of.comm.local_memory() == nullptr) {
    pack(of, of.slices.front(), {0, of.slices.front().bytes()}, sums);
    co_return;
  }
  HostMemory& memory = *of.comm.local_memory();
  const std::size_t grain = of.call.grain();
  const std::size_t room = round_down_to_lines(Arena::kSlotBytes / of.slices.size());
  std::size_t cycles = 1;
  for (const PartsOfSlice& slice : of.slices) {
    cycles = std::max(cycles, chunk_count(slice.bytes(), room));
  }
  std::vector<const void*> sources(static_cast<std::size_t>(memory.size()));
  for (std::size_t i = 0; i < cycles; ++i) {
    const Cycle cycle(memory);
    co_await cycle.writable();
    for (std::size_t s = 0; s < of.slices.size(); ++s) {
      pack(of, of.slices[s], chunk_of({0, of.slices[s].bytes()}, i, room), cycle.slot() + s * room);
    }
    cycle.arrive(Stage::kPacked);

    co_await cycle.reached(Stage::kPacked);
    if (of.has_slice()) {
      const std::size_t mine = static_cast<std::size_t>(of.local_rank) * room;
      const Part chunk = chunk_of({0, of.own_slice().bytes()}, i, room);
      for (int rank = 0; rank < memory.size(); ++rank) {
        sources[static_cast<std::size_t>(rank)] = cycle.slot(rank) + mine;
      }
      if (chunk.bytes > 0) {
        of.call.reduce(sums + chunk.begin, sources.data(), memory.size(), chunk.bytes / grain,
                       Finish{});
      }
    }
    cycle.arrive(Stage::kDone);
  }
}

// Gives the ranks of this host without a partner their parts. `results`: what this rank got for
// its host, its own part first.
Task distribute_in_host(const SlicedCall& of, const std::byte* results) {
  const Part& own = of.own();
  if (of.has_slice() && own.bytes > 0) std::memcpy(of.call.output, results, own.bytes);
  const std::vector<int>& ranks = of.host_ranks();
  const int count = of.slice_count();
  const int local_ranks = static_cast<int>(ranks.size());
  if (local_ranks <= count) co_return;
  HostMemory& memory = *of.comm.local_memory();
  const auto bytes_of = [&](int local) {
    return of.part_of(ranks[static_cast<std::size_t>(local)]).bytes;
  };
  // All that a rank has for others, chunk by chunk.
  const auto for_others = [&](int holder) {
    std::size_t bytes = 0;
    for (int to = holder + count; to < local_ranks; to += count) bytes += bytes_of(to);
    return bytes;
  };
  std::size_t cycles = 1;
  for (int holder = 0; holder < count; ++holder) {
    cycles = std::max(cycles, chunk_count(for_others(holder), Arena::kSlotBytes));
  }
  const std::size_t held = for_others(of.holder);
  std::size_t begin = 0;  // where this rank's part begins in what the holder has for others
  for (int to = of.holder + count; to < of.local_rank; to += count) begin += bytes_of(to);
  for (std::size_t i = 0; i < cycles; ++i) {
    const Cycle cycle(memory);
    co_await cycle.writable();
    if (of.has_slice()) {
      const Part chunk = chunk_of({own.bytes, held}, i, Arena::kSlotBytes);
      if (chunk.bytes > 0) {
        std::memcpy(cycle.slot(), results + chunk.begin, chunk.bytes);
      }
    }
    cycle.arrive(Stage::kPacked);

    co_await cycle.reached(Stage::kPacked);
    if (!of.has_slice()) {
      const Part chunk = chunk_of({0, held}, i, Arena::kSlotBytes);
      const std::size_t from = std::max(begin, chunk.begin);
      const std::size_t end = std::min(begin + own.bytes, chunk.begin + chunk.bytes);
      if (from < end) {
        std::memcpy(of.call.output + (from - begin), cycle.slot(of.holder) + (from - chunk.begin),
                    end - from);
      }
    }
    cycle.arrive(Stage::kDone);
  }
}

}  // namespace

Task reducescatter_hierarchical(Comm& comm, Call& call) {
  const SlicedCall of(comm, call);
  if (!of.has_slice()) {
    co_await reduce_in_host(of, nullptr);
    co_await distribute_in_host(of, nullptr);
    co_return;
  }
  const PartsOfSlice& slice = of.own_slice();
  std::byte* const sums = comm.scratch(Scratch::kWork, slice.bytes());
  co_await reduce_in_host(of, sums);

  std::byte* const results = comm.scratch(Scratch::kReceive, of.own_bytes_of_host());
  Layout layout(call.dtype, 1.0);
  layout.add(sums, sums, slice.bytes());
  Call between = call;
  between.layout = &layout;
  between.output = results;
  between.receive_bytes = slice.bytes_by_host();
  Comm& cross = *comm.cross_comm();
  co_await choose_algorithm(cross, between, nullptr).run(cross, between);
  co_await distribute_in_host(of, results);
}

}  // namespace horoplug
