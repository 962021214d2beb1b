// Adasum in shared memory: every rank takes its slice of all ranks' vectors and combines them by
// itself. Ranks exchange only the dot products of the slices, once for each level of the tree, and
// the results at the end. For the arithmetic, see adasum.h (Maleki et al., 2021).
#include <cstring>

#include "base/cache_line.h"
#include "collectives/adasum/adasum.h"
#include "collectives/collective.h"

namespace horoplug {
namespace {

// Up to this size every rank computes all slices: more arithmetic, but a single synchronisation.
constexpr std::size_t kOneShotBytes = 16 * 1024;

Part slice_bytes(const AdasumSlices& slices, int slice, std::size_t element) {
  return {slices.place(slice) * element, slices.elements({slice, slice + 1}) * element};
}

// One level of the tree: its vectors and the destination of the results.
struct Level {
  DType dtype;
  SliceRange range;
  std::vector<std::byte*> vectors;
  std::byte* wide;     // destination of 16-bit floats widened to float32
  std::size_t stride;  // distance between vectors in it
};

// The dot products of all pairs, pair by pair.
std::vector<DotProducts> dots_of_pairs(const AdasumSlices& slices, const Level& level) {
  std::vector<DotProducts> all;
  for (std::size_t i = 0; i < level.vectors.size(); i += 2) {
    const auto dots = slices.dots(level.dtype, level.range, level.vectors[i], level.vectors[i + 1]);
    all.insert(all.end(), dots.begin(), dots.end());
  }
  return all;
}

void combine_pairs(const AdasumSlices& slices, std::span<const DotProducts> dots, Level& level) {
  const bool widens = adasum_dtype(level.dtype) != level.dtype;
  for (std::size_t pair = 0; pair < level.vectors.size() / 2; ++pair) {
    std::byte* const a = level.vectors[2 * pair];
    std::byte* const to = widens ? level.wide + pair * level.stride : a;
    slices.combine(level.dtype, level.range, a, level.vectors[2 * pair + 1],
                   dots.subspan(pair * slices.tensors(), slices.tensors()), to);
    level.vectors[pair] = to;
  }
  level.vectors.resize(level.vectors.size() / 2);
  level.dtype = adasum_dtype(level.dtype);
}

// Adds the dot products of all ranks' slices, in the same tree as AdasumSlices::dots.
Task sum_dots(HostMemory& memory, std::vector<DotProducts>& dots) {
  constexpr std::size_t kAtOnce = Arena::kSlotBytes / sizeof(DotProducts);
  std::vector<DotProducts> parts(static_cast<std::size_t>(memory.size()));
  for (std::size_t begin = 0; begin < dots.size(); begin += kAtOnce) {
    const std::size_t count = std::min(kAtOnce, dots.size() - begin);
    const Cycle cycle(memory);
    co_await cycle.writable();
    std::memcpy(cycle.slot(), dots.data() + begin, count * sizeof(DotProducts));
    cycle.arrive(Stage::kPacked);
    co_await cycle.reached(Stage::kPacked);
    for (std::size_t i = 0; i < count; ++i) {
      for (int rank = 0; rank < memory.size(); ++rank) {
        std::memcpy(&parts[static_cast<std::size_t>(rank)],
                    cycle.slot(rank) + i * sizeof(DotProducts), sizeof(DotProducts));
      }
      for (std::size_t left = parts.size(); left > 1; left /= 2) {
        for (std::size_t k = 0; k < left / 2; ++k) parts[k] = parts[2 * k] + parts[2 * k + 1];
      }
      dots[begin + i] = parts[0];
    }
    cycle.arrive(Stage::kDone);
  }
}

Task one_shot(Comm& comm, Call& call, const AdasumSlices& slices) {
  HostMemory& memory = *comm.host_memory();
  const Part whole{0, call.layout->bytes()};
  const std::size_t elements = call.layout->bytes() / dtype_size(call.dtype);
  const auto ranks = static_cast<std::size_t>(memory.size());
  const std::size_t stride = round_up_to_lines(elements * dtype_size(adasum_dtype(call.dtype)));
  std::byte* const work = comm.scratch(Scratch::kWork, ranks * stride);

  const Cycle cycle(memory);
  co_await cycle.writable();
  slices.pack(whole, cycle.slot());
  cycle.arrive(Stage::kPacked);
  co_await cycle.reached(Stage::kPacked);
  Level level{
      call.dtype, slices.all(), {}, comm.scratch(Scratch::kReceive, ranks * stride), stride};
  for (int rank = 0; rank < memory.size(); ++rank) {
    // A copy, because vectors are combined in place.
    level.vectors.push_back(work + static_cast<std::size_t>(rank) * stride);
    std::memcpy(level.vectors.back(), cycle.slot(rank), whole.bytes);
  }
  cycle.arrive(Stage::kDone);

  while (level.vectors.size() > 1) {
    const auto dots = dots_of_pairs(slices, level);
    combine_pairs(slices, dots, level);
  }
  finish_adasum(call.dtype, work, level.vectors[0], elements, call.finish);
  slices.unpack(whole, work);
}

// Copies this rank's slice of every rank's vector to `to`, `stride` bytes apart.
Task collect(HostMemory& memory, const AdasumSlices& slices, std::size_t element, std::byte* to,
             std::size_t stride) {
  const auto ranks = static_cast<std::size_t>(memory.size());
  const std::size_t room = round_down_to_lines(Arena::kSlotBytes / ranks);
  const Part mine = slice_bytes(slices, memory.rank(), element);
  for (std::size_t i = 0; i < chunk_count(slices.largest() * element, room); ++i) {
    const Cycle cycle(memory);
    co_await cycle.writable();
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      const Part slice = slice_bytes(slices, static_cast<int>(rank), element);
      slices.pack(chunk_of(slice, i, room), cycle.slot() + rank * room);
    }
    cycle.arrive(Stage::kPacked);

    co_await cycle.reached(Stage::kPacked);
    const std::size_t bytes = chunk_of(mine, i, room).bytes;
    const std::size_t place = static_cast<std::size_t>(memory.rank()) * room;
    for (std::size_t rank = 0; bytes > 0 && rank < ranks; ++rank) {
      std::memcpy(to + rank * stride + i * room, cycle.slot(static_cast<int>(rank)) + place, bytes);
    }
    cycle.arrive(Stage::kDone);
  }
}

// Copies every rank's slice of the result to all ranks.
Task spread(HostMemory& memory, const AdasumSlices& slices, std::size_t element,
            const std::byte* from) {
  const Part mine = slice_bytes(slices, memory.rank(), element);
  for (std::size_t i = 0; i < chunk_count(slices.largest() * element, Arena::kSlotBytes); ++i) {
    const Cycle cycle(memory);
    co_await cycle.writable();
    const Part own = chunk_of(mine, i, Arena::kSlotBytes);
    if (own.bytes > 0) {
      std::memcpy(cycle.slot(), from + i * Arena::kSlotBytes, own.bytes);
    }
    cycle.arrive(Stage::kPacked);

    co_await cycle.reached(Stage::kPacked);
    for (int rank = 0; rank < memory.size(); ++rank) {
      const Part slice = slice_bytes(slices, rank, element);
      slices.unpack(chunk_of(slice, i, Arena::kSlotBytes), cycle.slot(rank));
    }
    cycle.arrive(Stage::kDone);
  }
}

}  // namespace

Task allreduce_adasum_direct(Comm& comm, Call& call) {
  const AdasumSlices slices(*call.layout, comm.size());
  if (call.layout->bytes() <= kOneShotBytes) {
    co_await one_shot(comm, call, slices);
    co_return;
  }
  HostMemory& memory = *comm.host_memory();
  const auto ranks = static_cast<std::size_t>(memory.size());
  const SliceRange mine{memory.rank(), memory.rank() + 1};
  const std::size_t elements = slices.elements(mine);
  const std::size_t element = dtype_size(call.dtype);
  const std::size_t wide = dtype_size(adasum_dtype(call.dtype));

  const std::size_t stride = round_up_to_lines(elements * element);
  std::byte* const work = comm.scratch(Scratch::kWork, ranks * stride);
  co_await collect(memory, slices, element, work, stride);

  Level level{call.dtype, mine, {}, nullptr, round_up_to_lines(elements * wide)};
  for (std::size_t rank = 0; rank < ranks; ++rank) level.vectors.push_back(work + rank * stride);
  if (wide != element) level.wide = comm.scratch(Scratch::kReceive, ranks / 2 * level.stride);
  while (level.vectors.size() > 1) {
    auto dots = dots_of_pairs(slices, level);
    co_await sum_dots(memory, dots);
    combine_pairs(slices, dots, level);
  }
  finish_adasum(call.dtype, work, level.vectors[0], elements, call.finish);
  co_await spread(memory, slices, element, work);
}

}  // namespace horoplug
