// Allgather over several hosts. Ranks with the same local rank, one per host, gather their parts
// between the hosts, all local ranks at once. Then the ranks of a host share what they have
// gathered in shared memory. A host's link carries each part once, in the rounds that the number of
// hosts requires (Träff, "Efficient allgather for regular SMP-clusters", 2006).
//
// Where hosts have different numbers of ranks, ranks without a partner on every host first pass
// their parts to a rank of their host that has one.
#include <cstring>

#include "collectives/stream/hierarchical.h"

namespace horoplug {
namespace {

// The parts of this rank and of the ranks of its host without a partner that pass theirs to it, one
// after the other; nullptr on the latter. At least one cycle if there are such ranks, so that other
// hosts hear from them, too.
Task collect_in_host(const SlicedCall& of, std::byte* contribution) {
  if (contribution != nullptr && of.own().bytes > 0) {
    std::memcpy(contribution, of.call.input, of.own().bytes);
  }
  const std::vector<int>& ranks = of.host_ranks();
  const int count = of.slice_count();
  if (static_cast<int>(ranks.size()) <= count) co_return;
  std::size_t largest = 1;
  for (std::size_t i = static_cast<std::size_t>(count); i < ranks.size(); ++i) {
    largest = std::max(largest, of.part_of(ranks[i]).bytes);
  }
  for (std::size_t i = 0; i < chunk_count(largest, Arena::kSlotBytes); ++i) {
    HostMemory& memory = *of.comm.local_memory();
    const Cycle cycle(memory);
    co_await cycle.writable();
    if (!of.has_slice()) {
      const Part mine = chunk_of({0, of.own().bytes}, i, Arena::kSlotBytes);
      if (mine.bytes > 0) {
        std::memcpy(cycle.slot(), of.call.input + mine.begin, mine.bytes);
      }
    }
    cycle.arrive(Stage::kPacked);

    co_await cycle.reached(Stage::kPacked);
    std::size_t to = of.own().bytes;
    for (int from = of.local_rank + count; of.has_slice() && from < memory.size(); from += count) {
      const std::size_t bytes = of.part_of(ranks[static_cast<std::size_t>(from)]).bytes;
      const Part chunk = chunk_of({to, bytes}, i, Arena::kSlotBytes);
      if (chunk.bytes > 0) {
        std::memcpy(contribution + chunk.begin, cycle.slot(from), chunk.bytes);
      }
      to += bytes;
    }
    cycle.arrive(Stage::kDone);
  }
}

void write_output(const SlicedCall& of, int slice, const Part& range, const std::byte* data) {
  of.slices[static_cast<std::size_t>(slice)].for_each(
      range, [&](std::size_t to, std::size_t at, std::size_t bytes) {
        std::memcpy(of.call.output + to, data + at, bytes);
      });
}

// Copies all slices to all ranks of the host. At least one cycle: a rank whose slice is empty
// waits for the others, too.
Task share_in_host(const SlicedCall& of, const std::byte* gathered) {
  if (of.comm.local_memory() == nullptr) {
    write_output(of, 0, {0, of.slices.front().bytes()}, gathered);
    co_return;
  }
  HostMemory& memory = *of.comm.local_memory();
  std::size_t cycles = 1;
  for (const PartsOfSlice& slice : of.slices) {
    cycles = std::max(cycles, chunk_count(slice.bytes(), Arena::kSlotBytes));
  }
  const auto chunk = [&](int slice, std::size_t i) {
    return chunk_of({0, of.slices[static_cast<std::size_t>(slice)].bytes()}, i, Arena::kSlotBytes);
  };
  for (std::size_t i = 0; i < cycles; ++i) {
    const Cycle cycle(memory);
    co_await cycle.writable();
    if (of.has_slice()) {
      const Part mine = chunk(of.local_rank, i);
      if (mine.bytes > 0) {
        std::memcpy(cycle.slot(), gathered + mine.begin, mine.bytes);
      }
    }
    cycle.arrive(Stage::kPacked);

    co_await cycle.reached(Stage::kPacked);
    for (int slice = 0; slice < of.slice_count(); ++slice) {
      write_output(of, slice, chunk(slice, i), cycle.slot(slice));
    }
    cycle.arrive(Stage::kDone);
  }
}

}  // namespace

Task allgather_hierarchical(Comm& comm, Call& call) {
  const SlicedCall of(comm, call);
  std::byte* gathered = nullptr;
  if (of.has_slice()) {
    const PartsOfSlice& slice = of.own_slice();
    std::byte* const contribution = comm.scratch(Scratch::kReceive, of.own_bytes_of_host());
    co_await collect_in_host(of, contribution);
    gathered = comm.scratch(Scratch::kWork, slice.bytes());
    Call between = call;
    between.input = contribution;
    between.output = gathered;
    between.receive_bytes = slice.bytes_by_host();
    Comm& cross = *comm.cross_comm();
    co_await choose_algorithm(cross, between, nullptr).run(cross, between);
  } else {
    co_await collect_in_host(of, nullptr);
  }
  co_await share_in_host(of, gathered);
}

}  // namespace horoplug
