// Alltoall of parts of any sizes by MPI's own algorithms.
#include <cstring>
#include <numeric>

#include "collectives/mpi/common.h"

namespace horoplug {

Task alltoall_mpi(Comm& comm, Call& call) {
  const auto sum = [](std::span<const std::size_t> parts) {
    return std::accumulate(parts.begin(), parts.end(), std::size_t{0});
  };
  const std::size_t outgoing = sum(call.send_bytes);
  const std::size_t incoming = sum(call.receive_bytes);
  const std::size_t room = MpiParts::room(comm.size());
  Comm::Lent work(comm, Scratch::kMpi, 2 * room + mpi_room(outgoing) + incoming);
  const MpiParts sent(work.data(), call.send_bytes);
  const MpiParts received(work.data() + room, call.receive_bytes);
  std::byte* const input = work.data() + 2 * room;
  std::byte* const output = input + mpi_room(outgoing);
  if (outgoing > 0) std::memcpy(input, call.input, outgoing);
  MpiEnd end(comm,
             [&](Mpi& mpi) { return mpi.alltoall(input, sent.table(), output, received.table()); });
  co_await end;
  work.give_back();
  if (incoming > 0) std::memcpy(call.output, output, incoming);
}

}  // namespace horoplug
