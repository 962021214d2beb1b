// Allreduce over several hosts with the same number of ranks each. The ranks of a host reduce in
// shared memory, each rank one slice. Each slice is then reduced between the hosts by the ranks
// that hold it, all slices concurrently, so that a host's link carries the data once instead of
// once per rank. Finally the ranks of a host share the results in shared memory. (As the
// two-dimensional allreduce of Mikami et al., "Massively distributed SGD: ImageNet/ResNet-50
// training in a flash", 2018, with hosts as the rows.)
//
// Outputs are written in the last step only, which needs data of every rank.
#include <cstring>

#include "collectives/collective.h"
#include "collectives/partition.h"

namespace horoplug {
namespace {

constexpr std::size_t kGrain = 64;  // slices begin on cache lines

// Divides the buffer into segments of one cycle. This rank's slices of all segments are stored
// contiguously. The segment size determines which rank reduces which element, so it is not tuned.
class Slices {
 public:
  Slices(std::size_t bytes, const HostMemory& memory) : whole_{0, bytes}, memory_(memory) {}

  std::size_t cycles() const { return chunk_count(whole_.bytes, Arena::kSlotBytes); }
  Part segment(std::size_t cycle) const { return chunk_of(whole_, cycle, Arena::kSlotBytes); }
  // Positions within the segment, by rank.
  std::vector<Part> slices(std::size_t cycle) const {
    return split_evenly(segment(cycle).bytes, memory_.size(), kGrain);
  }
  Part mine(std::size_t cycle) const {
    return slices(cycle)[static_cast<std::size_t>(memory_.rank())];
  }
  std::size_t bytes_of_mine() const {
    std::size_t sum = 0;
    for (std::size_t cycle = 0; cycle < cycles(); ++cycle) sum += mine(cycle).bytes;
    return sum;
  }

 private:
  const Part whole_;
  const HostMemory& memory_;
};

// Reduces this rank's slices of its host's inputs into `to`.
Task reduce_in_host(HostMemory& memory, Call& call, const Slices& slices, std::byte* to) {
  const std::size_t element = dtype_size(call.dtype);
  std::vector<const void*> sources(static_cast<std::size_t>(memory.size()));
  for (std::size_t i = 0; i < slices.cycles(); ++i) {
    const std::uint64_t cycle = memory.next_cycle();
    co_await memory.writable(cycle);
    call.layout->pack(slices.segment(i).begin, slices.segment(i).bytes,
                      memory.slot(memory.rank(), cycle));
    memory.arrive(Stage::kPacked, cycle);

    co_await memory.reached(Stage::kPacked, cycle);
    const Part mine = slices.mine(i);
    for (int rank = 0; rank < memory.size(); ++rank) {
      sources[static_cast<std::size_t>(rank)] = memory.slot(rank, cycle) + mine.begin;
    }
    call.reduce(to, sources.data(), memory.size(), mine.bytes / element, Finish{});
    to += mine.bytes;
    memory.arrive(Stage::kDone, cycle);
  }
}

// Reduces this rank's slices between the hosts, with the cheapest algorithm.
Task reduce_between_hosts(Comm& comm, const Call& call, std::byte* data, std::size_t bytes) {
  if (bytes == 0) co_return;
  Layout layout(call.dtype, 1.0);
  layout.add(data, data, bytes);
  Call part = call;
  part.layout = &layout;
  co_await choose_algorithm(comm, part, nullptr).run(comm, part);
}

// Copies every rank's slices to all ranks of the host.
Task share_in_host(HostMemory& memory, Call& call, const Slices& slices, const std::byte* from) {
  for (std::size_t i = 0; i < slices.cycles(); ++i) {
    const std::uint64_t cycle = memory.next_cycle();
    co_await memory.writable(cycle);
    const Part mine = slices.mine(i);
    if (mine.bytes > 0) std::memcpy(memory.slot(memory.rank(), cycle), from, mine.bytes);
    from += mine.bytes;
    memory.arrive(Stage::kPacked, cycle);

    co_await memory.reached(Stage::kPacked, cycle);
    const auto parts = slices.slices(i);
    for (int rank = 0; rank < memory.size(); ++rank) {
      const Part& part = parts[static_cast<std::size_t>(rank)];
      call.layout->unpack(slices.segment(i).begin + part.begin, part.bytes,
                          memory.slot(rank, cycle));
    }
    memory.arrive(Stage::kDone, cycle);
  }
}

}  // namespace

Task allreduce_hierarchical(Comm& comm, Call& call) {
  HostMemory& memory = *comm.local_memory();
  const Slices slices(call.layout->bytes(), memory);
  const std::size_t bytes = slices.bytes_of_mine();
  std::byte* const work = comm.scratch(Scratch::kWork, bytes);
  co_await reduce_in_host(memory, call, slices, work);
  co_await reduce_between_hosts(*comm.cross_comm(), call, work, bytes);
  co_await share_in_host(memory, call, slices, work);
}

}  // namespace horoplug
