// Alltoall by messages between every pair of ranks, all of them in flight at once: the algorithm
// for medium-sized messages of Thakur, Rabenseifner and Gropp ("Optimization of collective
// communication operations in MPICH", 2005).
#include <cstring>
#include <deque>

#include "collectives/collective.h"
#include "collectives/partition.h"
#include "collectives/stream/exchange.h"

namespace horoplug {

Task alltoall_pairwise(Comm& comm, Call& call) {
  const auto outgoing = consecutive(call.send_bytes);
  const auto incoming = consecutive(call.receive_bytes);
  const auto me = static_cast<std::size_t>(comm.rank());

  std::deque<Link::Receive> posted;
  // The order of partners spreads the load: each rank has a different first partner.
  for (int distance = 1; distance < comm.size(); ++distance) {
    const int from = (comm.rank() + comm.size() - distance) % comm.size();
    const Part& in = incoming[static_cast<std::size_t>(from)];
    for (std::size_t i = 0; i < chunk_count(in.bytes, Comm::kChunkBytes); ++i) {
      const Part chunk = chunk_of(in, i, Comm::kChunkBytes);
      comm.post(posted, from, call.output + chunk.begin, chunk.bytes);
    }
    const int to = (comm.rank() + distance) % comm.size();
    const Part& out = outgoing[static_cast<std::size_t>(to)];
    send_all(comm, to, call.input + out.begin, out.bytes);
  }
  if (outgoing[me].bytes > 0) {
    std::memcpy(call.output + incoming[me].begin, call.input + outgoing[me].begin,
                outgoing[me].bytes);
  }
  for (auto& receive : posted) co_await receive;
  co_await comm.flushed();
}

}  // namespace horoplug
