// Allreduce around a ring: a reduce-scatter pass and an allgather pass, 2 (p-1)/p of the data over
// each link (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
// workstations", 2009).
#include "collectives/stream/ring.h"

namespace horoplug {

Task allreduce_ring(Comm& comm, Call& call) {
  Layout& layout = *call.layout;
  std::byte* work = layout.contiguous_output();
  if (work == nullptr) work = comm.scratch(Scratch::kWork, layout.bytes());
  layout.pack(0, layout.bytes(), work);

  const auto parts = split_evenly(layout.bytes(), comm.size(), call.grain());
  const int steps = comm.size() - 1;
  co_await ring_pass(comm, call, {work, parts, comm.rank(), steps, 2 * steps});

  layout.unpack(0, layout.bytes(), work);
}

}  // namespace horoplug
