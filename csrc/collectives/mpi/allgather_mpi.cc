// Allgather of parts of any sizes by MPI's own algorithms.
#include <cstring>

#include "collectives/mpi/common.h"
#include "collectives/partition.h"

namespace horoplug {

Task allgather_mpi(Comm& comm, Call& call) {
  const Part own = consecutive(call.receive_bytes)[static_cast<std::size_t>(comm.rank())];
  const std::size_t bytes = call.bytes();
  const std::size_t room = MpiParts::room(comm.size());
  Comm::Lent work(comm, Scratch::kMpi, room + bytes);
  const MpiParts parts(work.data(), call.receive_bytes);
  std::byte* const data = work.data() + room;
  if (own.bytes > 0) std::memcpy(data + own.begin, call.input, own.bytes);
  MpiEnd end(comm, [&](Mpi& mpi) { return mpi.allgather(data, parts.table()); });
  co_await end;
  work.give_back();
  if (bytes > 0) std::memcpy(call.output, data, bytes);
}

}  // namespace horoplug
