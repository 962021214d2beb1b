// Reduce-scatter around a ring: starting one part earlier than allreduce does, each rank ends up
// with its own part (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
// workstations", 2009).
#include <cstring>

#include "collectives/stream/ring.h"

namespace horoplug {

Task reducescatter_ring(Comm& comm, Call& call) {
  Layout& layout = *call.layout;
  std::byte* const work = comm.scratch(Scratch::kWork, layout.bytes());
  layout.pack(0, layout.bytes(), work);

  const auto parts = consecutive(call.receive_bytes);
  const int steps = comm.size() - 1;
  const int first = (comm.rank() + comm.size() - 1) % comm.size();
  co_await ring_pass(comm, call, {work, parts, first, steps, steps});

  const Part& own = parts[static_cast<std::size_t>(comm.rank())];
  if (own.bytes > 0) std::memcpy(call.output, work + own.begin, own.bytes);
}

}  // namespace horoplug
