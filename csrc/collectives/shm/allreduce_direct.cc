// Allreduce in shared memory: every rank copies its input to its slot, reduces its part of the
// buffer from all slots, and copies the other parts from the slots of the ranks that reduced them.
//
// The copy in is the packing of the fused tensors, and the copy out their unpacking. A rank's own
// part is neither packed nor unpacked: no other rank reads that input, and the result is written to
// the output and to the slot at the same time. Operands are combined in rank order, with float32
// accumulation for 16-bit floats, by one rank for each element: all ranks get the same bits.
//
// Ranks whose tensors lie in a shared buffer neither pack nor unpack: once all ranks have arrived,
// and user memory may be written, each rank reduces its part in place. Ranks learn from each
// other's first flag whether all tensors lie in such a buffer.

#include "base/cache_line.h"
#include "collectives/collective.h"
#include "collectives/partition.h"

namespace horoplug {
namespace {

// A reduced block is copied while it is in the L1 cache.
constexpr std::size_t kBlock = 8192;

class Direct {
 public:
  Direct(HostMemory& memory, Call& call, std::size_t chunk)
      : memory_(memory),
        call_(call),
        layout_(*call.layout),
        me_(memory.rank()),
        grain_(call.grain()),
        chunk_(chunk) {}

  std::size_t cycles() const { return chunk_count(layout_.bytes(), chunk_); }

  // Chunk number `index` runs in a cycle of the host memory.
  void pack(std::size_t index, const Cycle& cycle) {
    const Part chunk = chunk_at(index);
    const Part mine = part_of(chunk, me_);
    std::byte* const slot = cycle.slot();
    const std::size_t after = mine.begin + mine.bytes;
    layout_.pack(chunk.begin, mine.begin, slot);
    layout_.pack(chunk.begin + after, chunk.bytes - after, slot + after);
  }

  void reduce(std::size_t index, const Cycle& cycle) {
    const Part chunk = chunk_at(index);
    const Part mine = part_of(chunk, me_);
    layout_.for_each_run(chunk.begin + mine.begin, mine.bytes, [&](const Layout::Run& run) {
      for (std::size_t at = 0; at < run.bytes; at += kBlock) {
        reduce_block(run, at, std::min(kBlock, run.bytes - at), cycle,
                     run.begin + at - chunk.begin);
      }
    });
  }

  // If all ranks' tensors lie in the shared buffer: reduces this rank's part of the buffer, and
  // writes the result to all ranks.
  void reduce_in_place() {
    const Part mine = even_part(layout_.bytes(), memory_.size(), kCacheLine, me_);
    const auto operands = memory_.operands();
    layout_.for_each_run(mine.begin, mine.bytes, [&](const Layout::Run& run) {
      for (std::size_t at = 0; at < run.bytes; at += kBlock) {
        const std::size_t bytes = std::min(kBlock, run.bytes - at);
        for (std::size_t rank = 0; rank < operands.size(); ++rank) {
          operands[rank] = run.output + at + call_.distances[rank];
        }
        call_.reduce(run.output + at, operands.data(), memory_.size(), bytes / grain_,
                     call_.finish);
        for (int rank = 0; rank < memory_.size(); ++rank) {
          if (rank == me_) continue;
          kernels().copy(run.output + at + call_.distances[static_cast<std::size_t>(rank)],
                         run.output + at, bytes);
        }
      }
    });
  }

  void unpack(std::size_t index, const Cycle& cycle) {
    const Part chunk = chunk_at(index);
    for (int i = 1; i < memory_.size(); ++i) {
      const int rank = (me_ + i) % memory_.size();
      const Part part = part_of(chunk, rank);
      layout_.unpack(chunk.begin + part.begin, part.bytes, cycle.slot(rank) + part.begin);
    }
  }

 private:
  Part chunk_at(std::size_t index) const { return chunk_of({0, layout_.bytes()}, index, chunk_); }
  // No cache line is written by two ranks.
  Part part_of(const Part& chunk, int rank) const {
    return even_part(chunk.bytes, memory_.size(), kCacheLine, rank);
  }

  // `place`: the position of the block in the slots.
  void reduce_block(const Layout::Run& run, std::size_t at, std::size_t bytes, const Cycle& cycle,
                    std::size_t place) {
    const auto operands = memory_.operands();
    for (int rank = 0; rank < memory_.size(); ++rank) {
      operands[static_cast<std::size_t>(rank)] = cycle.slot(rank) + place;
    }
    std::byte* const shown = cycle.slot() + place;
    if (run.input != nullptr) {
      operands[static_cast<std::size_t>(me_)] = run.input + at;
    } else {
      layout_.pack(run.begin + at, bytes, shown);
    }
    std::byte* const result = run.output != nullptr ? run.output + at : shown;
    call_.reduce(result, operands.data(), memory_.size(), bytes / grain_, call_.finish);
    if (result != shown) {
      kernels().copy(shown, result, bytes);
    } else {
      layout_.unpack(run.begin + at, bytes, shown);
    }
  }

  HostMemory& memory_;
  Call& call_;
  Layout& layout_;
  const int me_;
  const std::size_t grain_;
  const std::size_t chunk_;
};

}  // namespace

Task allreduce_direct(Comm& comm, Call& call) {
  HostMemory& memory = *comm.host_memory();
  Direct direct(memory, call, comm.chunk_bytes());
  const std::size_t cycles = direct.cycles();
  const bool packs = call.place == 0;

  Cycle cycle(memory);
  co_await cycle.writable();
  if (packs) direct.pack(0, cycle);
  cycle.publish(Stage::kPacked, call.place);
  if (!packs) {
    co_await cycle.reached(Stage::kPacked);
    if (cycle.inputs() == HostMemory::Inputs::kInOnePlace) {
      direct.reduce_in_place();
      cycle.publish(Stage::kReduced);
      // Afterwards no rank writes this rank's memory any more.
      co_await cycle.reached(Stage::kReduced);
      cycle.publish(Stage::kDone);
      co_return;
    }
    direct.pack(0, cycle);
  }

  for (std::size_t i = 0; i < cycles; ++i) {
    Cycle following = cycle;
    if (i == 0 && !packs) cycle.publish(Stage::kRepacked);
    if (i + 1 < cycles) {
      // Packing runs one cycle ahead, so that this rank works while its peers still pack.
      following = Cycle(memory);
      co_await following.writable();
      direct.pack(i + 1, following);
      following.publish(Stage::kPacked);
    }
    co_await cycle.reached(Stage::kPacked);
    if (i == 0 && cycle.inputs() == HostMemory::Inputs::kMixed) {
      if (packs) cycle.publish(Stage::kRepacked);
      co_await cycle.reached(Stage::kRepacked);
    }
    direct.reduce(i, cycle);
    cycle.publish(Stage::kReduced);

    co_await cycle.reached(Stage::kReduced);
    direct.unpack(i, cycle);
    cycle.publish(Stage::kDone);
    cycle = following;
  }
}

}  // namespace horoplug
