// Allgather around a ring: every part passes around the ring once, and every rank keeps a copy
// (Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH",
// 2005).
#include <cstring>

#include "collectives/stream/ring.h"

namespace horoplug {

Task allgather_ring(Comm& comm, Call& call) {
  const auto parts = consecutive(call.receive_bytes);
  const Part& own = parts[static_cast<std::size_t>(comm.rank())];
  if (own.bytes > 0) std::memcpy(call.output + own.begin, call.input, own.bytes);
  co_await ring_pass(comm, call, {call.output, parts, comm.rank(), 0, comm.size() - 1});
}

}  // namespace horoplug
