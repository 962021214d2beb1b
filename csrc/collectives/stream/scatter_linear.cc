// Scatter by messages from the root directly to every rank, all of them in flight at once.
#include <cstring>

#include "collectives/collective.h"
#include "collectives/partition.h"
#include "collectives/stream/exchange.h"

namespace horoplug {

Task scatter_linear(Comm& comm, Call& call) {
  const auto parts = consecutive(call.receive_bytes);
  const Part& own = parts[static_cast<std::size_t>(comm.rank())];
  if (comm.rank() != call.root) {
    co_await receive_all(comm, call.root, call.output, own.bytes);
    co_return;
  }
  for (int distance = 1; distance < comm.size(); ++distance) {
    const int rank = (comm.rank() + distance) % comm.size();
    const Part& part = parts[static_cast<std::size_t>(rank)];
    send_all(comm, rank, call.input + part.begin, part.bytes);
  }
  if (own.bytes > 0) std::memcpy(call.output, call.input + own.begin, own.bytes);
  co_await comm.flushed();
}

}  // namespace horoplug
