// Allreduce over several hosts. The ranks of a host reduce in shared memory, each rank one slice.
// Each slice is then reduced between the hosts by the ranks that hold it, all slices concurrently,
// so that a host's link carries the data once instead of once per rank. Finally the ranks of a host
// share the results in shared memory. (As the two-dimensional allreduce of Mikami et al.,
// "Massively distributed SGD: ImageNet/ResNet-50 training in a flash", 2018, with hosts as the
// rows.)
//
// There are as many slices as the host with the fewest ranks has. Further ranks of other hosts
// contribute to their host's sums and copy the results.
//
// Large buffers are divided into blocks: while one is reduced between the hosts, the next one is
// reduced within them, and the last one is shared. Outputs are written when a block is shared,
// which needs data of every rank.
#include <cstring>

#include "base/cache_line.h"
#include "collectives/collective.h"
#include "collectives/partition.h"
#include "collectives/stream/hierarchical.h"
#include "collectives/together.h"

namespace horoplug {
namespace {

// Divides the buffer into segments of one cycle. This rank's slices of all segments are stored
// contiguously. The sizes determine which rank reduces which element, so they are not tuned.
class Slices {
 public:
  Slices(std::size_t bytes, const HostGrid& hosts, int rank)
      : whole_{0, bytes},
        count_(hosts.fewest()),
        local_rank_(hosts.local_rank(rank)),
        cycles_per_block_(hierarchical_block(hosts) / Arena::kSlotBytes) {}

  int count() const { return count_; }
  Part segment(std::size_t cycle) const { return chunk_of(whole_, cycle, Arena::kSlotBytes); }
  // A slice's position within the segment.
  Part slice(std::size_t cycle, int index) const {
    return even_part(segment(cycle).bytes, count_, kCacheLine, index);
  }
  Part mine(std::size_t cycle) const {
    return local_rank_ < count_ ? slice(cycle, local_rank_) : Part{};
  }

  // The cycles of a block: first and end.
  std::size_t blocks() const {
    return chunk_count(whole_.bytes, cycles_per_block_ * Arena::kSlotBytes);
  }
  std::size_t begin(std::size_t block) const {
    return std::min(block * cycles_per_block_, chunk_count(whole_.bytes, Arena::kSlotBytes));
  }
  std::size_t end(std::size_t block) const { return begin(block + 1); }
  // The block's bytes in the buffer.
  Part part(std::size_t block) const {
    return chunk_of(whole_, block, cycles_per_block_ * Arena::kSlotBytes);
  }
  // Where this rank's slices of a block are stored.
  Part stored(std::size_t block) const {
    const std::size_t before = mine(0).bytes * begin(block);  // only the last cycle is smaller
    std::size_t bytes = 0;
    for (std::size_t cycle = begin(block); cycle < end(block); ++cycle) bytes += mine(cycle).bytes;
    return {before, bytes};
  }

 private:
  const Part whole_;
  const int count_;
  const int local_rank_;
  const std::size_t cycles_per_block_;
};

// What the steps share. `reduced` and `exchanged` count the blocks that are done with a step.
struct Allreduce {
  Comm& comm;
  Call& call;
  const Slices slices;
  std::byte* work = nullptr;
  std::size_t reduced = 0;
  std::size_t exchanged = 0;
};

// Reduces this rank's slices of its host's inputs.
Task reduce_in_host(Allreduce& of, std::size_t block) {
  const Slices& slices = of.slices;
  std::byte* to = of.work + slices.stored(block).begin;
  if (of.comm.local_memory() == nullptr) {
    of.call.layout->pack(slices.part(block).begin, slices.part(block).bytes, to);
    co_return;
  }
  HostMemory& memory = *of.comm.local_memory();
  const std::size_t grain = of.call.grain();
  std::vector<const void*> sources(static_cast<std::size_t>(memory.size()));
  for (std::size_t i = slices.begin(block); i < slices.end(block); ++i) {
    const Cycle cycle(memory);
    co_await cycle.writable();
    of.call.layout->pack(slices.segment(i).begin, slices.segment(i).bytes, cycle.slot());
    cycle.arrive(Stage::kPacked);

    co_await cycle.reached(Stage::kPacked);
    const Part mine = slices.mine(i);
    if (mine.bytes > 0) {
      for (int rank = 0; rank < memory.size(); ++rank) {
        sources[static_cast<std::size_t>(rank)] = cycle.slot(rank) + mine.begin;
      }
      of.call.reduce(to, sources.data(), memory.size(), mine.bytes / grain, Finish{});
      to += mine.bytes;
    }
    cycle.arrive(Stage::kDone);
  }
}

// Reduces this rank's slices between the hosts, with the cheapest algorithm.
Task reduce_between_hosts(Allreduce& of, std::size_t block) {
  const Part stored = of.slices.stored(block);
  if (stored.bytes == 0) co_return;
  Layout layout(of.call.dtype, 1.0);
  layout.add(of.work + stored.begin, of.work + stored.begin, stored.bytes);
  Call part = of.call;
  part.layout = &layout;
  Comm& comm = *of.comm.cross_comm();
  co_await choose_algorithm(comm, part, nullptr).run(comm, part);
}

// Copies every rank's slices to all ranks of the host.
Task share_in_host(Allreduce& of, std::size_t block) {
  const Slices& slices = of.slices;
  const std::byte* from = of.work + slices.stored(block).begin;
  if (of.comm.local_memory() == nullptr) {
    of.call.layout->unpack(slices.part(block).begin, slices.part(block).bytes, from);
    co_return;
  }
  HostMemory& memory = *of.comm.local_memory();
  for (std::size_t i = slices.begin(block); i < slices.end(block); ++i) {
    const Cycle cycle(memory);
    co_await cycle.writable();
    const Part mine = slices.mine(i);
    if (mine.bytes > 0) std::memcpy(cycle.slot(), from, mine.bytes);
    from += mine.bytes;
    cycle.arrive(Stage::kPacked);

    co_await cycle.reached(Stage::kPacked);
    for (int rank = 0; rank < slices.count(); ++rank) {
      const Part part = slices.slice(i, rank);
      of.call.layout->unpack(slices.segment(i).begin + part.begin, part.bytes, cycle.slot(rank));
    }
    cycle.arrive(Stage::kDone);
  }
}

// All ranks of a host run the steps in memory in this order.
Task run_in_memory(Allreduce& of) {
  const std::size_t blocks = of.slices.blocks();
  for (std::size_t block = 0; block <= blocks; ++block) {
    if (block < blocks) {
      co_await reduce_in_host(of, block);
      of.reduced = block + 1;
    }
    if (block == 0) continue;
    co_await Raised(of.exchanged, block);
    co_await share_in_host(of, block - 1);
  }
}

Task run_between_hosts(Allreduce& of) {
  for (std::size_t block = 0; block < of.slices.blocks(); ++block) {
    co_await Raised(of.reduced, block + 1);
    co_await reduce_between_hosts(of, block);
    of.exchanged = block + 1;
  }
}

}  // namespace

Task allreduce_hierarchical(Comm& comm, Call& call) {
  Allreduce of{comm, call, Slices(call.layout->bytes(), *comm.hosts(), comm.rank())};
  const Part last = of.slices.stored(of.slices.blocks() - 1);
  of.work = comm.scratch(Scratch::kWork, last.begin + last.bytes);
  Together both;
  both.add(run_in_memory(of));
  both.add(run_between_hosts(of));
  while (!both.done()) co_await both;
}

}  // namespace horoplug
