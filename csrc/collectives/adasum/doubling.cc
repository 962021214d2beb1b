// Adasum over streams for small batches: log2(p) exchanges of the whole vector, which both ranks
// combine identically. For recursive doubling, see allreduce_doubling.cc; for Adasum, see adasum.h
// (Maleki et al., 2021).
#include "collectives/adasum/adasum.h"
#include "collectives/collective.h"
#include "collectives/stream/exchange.h"

namespace horoplug {

Task allreduce_adasum_doubling(Comm& comm, Call& call) {
  Layout& layout = *call.layout;
  const AdasumSlices slices(layout, comm.size());
  const std::size_t elements = layout.bytes() / dtype_size(call.dtype);
  const std::size_t wide = dtype_size(adasum_dtype(call.dtype));
  std::byte* const mine = comm.scratch(Scratch::kWork, 2 * elements * wide);
  std::byte* const results = mine + elements * wide;
  std::byte* const theirs = comm.scratch(Scratch::kReceive, elements * wide);
  slices.pack({0, layout.bytes()}, mine);

  DType dtype = call.dtype;
  std::byte* current = mine;
  for (int distance = 1; distance < comm.size(); distance *= 2) {
    const int peer = comm.rank() ^ distance;
    send_all(comm, peer, current, elements * dtype_size(dtype));
    co_await receive_all(comm, peer, theirs, elements * dtype_size(dtype));
    co_await comm.flushed();  // the result may replace data that was being sent
    const bool upper = (comm.rank() & distance) != 0;
    const std::byte* const a = upper ? theirs : current;
    const std::byte* const b = upper ? current : theirs;
    slices.combine(dtype, slices.all(), a, b, slices.dots(dtype, slices.all(), a, b), results);
    current = results;
    dtype = adasum_dtype(dtype);
  }
  finish_adasum(call.dtype, mine, results, elements, call.finish);
  slices.unpack({0, layout.bytes()}, mine);
}

}  // namespace horoplug
