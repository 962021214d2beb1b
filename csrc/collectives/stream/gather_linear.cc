// Gather by messages from every rank directly to the root, all of them in flight at once.
#include <cstring>
#include <deque>

#include "collectives/collective.h"
#include "collectives/partition.h"
#include "collectives/stream/exchange.h"

namespace horoplug {

Task gather_linear(Comm& comm, Call& call) {
  const auto parts = consecutive(call.receive_bytes);
  const Part& own = parts[static_cast<std::size_t>(comm.rank())];
  if (comm.rank() != call.root) {
    send_all(comm, call.root, call.input, own.bytes);
    co_await comm.flushed();
    co_return;
  }
  std::deque<Link::Receive> posted;
  for (int rank = 0; rank < comm.size(); ++rank) {
    if (rank == comm.rank()) continue;
    const Part& part = parts[static_cast<std::size_t>(rank)];
    for (std::size_t i = 0; i < chunk_count(part.bytes, Comm::kChunkBytes); ++i) {
      const Part chunk = chunk_of(part, i, Comm::kChunkBytes);
      comm.post(posted, rank, call.output + chunk.begin, chunk.bytes);
    }
  }
  if (own.bytes > 0) std::memcpy(call.output + own.begin, call.input, own.bytes);
  for (auto& receive : posted) co_await receive;
}

}  // namespace horoplug
