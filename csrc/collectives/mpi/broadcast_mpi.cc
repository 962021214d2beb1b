// Broadcast by MPI's own algorithms.
#include <algorithm>

#include "collectives/mpi/common.h"

namespace horoplug {

Task broadcast_mpi(Comm& comm, Call& call) {
  Layout& layout = *call.layout;
  Comm::Lent work(comm, Scratch::kMpi, layout.bytes());
  if (comm.rank() == call.root) layout.pack(0, layout.bytes(), work.data());
  for (std::size_t at = 0; at < layout.bytes(); at += Mpi::kMostElements) {
    const std::size_t bytes = std::min(Mpi::kMostElements, layout.bytes() - at);
    MpiEnd end(comm, [&](Mpi& mpi) { return mpi.broadcast(work.data() + at, bytes, call.root); });
    co_await end;
  }
  work.give_back();
  layout.unpack(0, layout.bytes(), work.data());
}

}  // namespace horoplug
