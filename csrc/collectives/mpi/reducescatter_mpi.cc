// Reduce-scatter by MPI's own algorithms. Each element is one rank's alone; as to NaNs, see
// allreduce_mpi.cc.
#include <cstring>

#include "collectives/mpi/common.h"
#include "collectives/partition.h"

namespace horoplug {

Task reducescatter_mpi(Comm& comm, Call& call) {
  Layout& layout = *call.layout;
  const std::size_t own = call.receive_bytes[static_cast<std::size_t>(comm.rank())];
  const std::size_t element = dtype_size(call.dtype);
  const std::size_t room = MpiParts::room(comm.size());
  Comm::Lent work(comm, Scratch::kMpi, room + mpi_room(own) + layout.bytes());
  const MpiParts parts(work.data(), call.receive_bytes, element);
  std::byte* const result = work.data() + room;
  std::byte* const input = result + mpi_room(own);
  layout.pack(0, layout.bytes(), input);
  MpiEnd end(comm, [&](Mpi& mpi) {
    return mpi.reducescatter(input, result, parts.table().sizes, call.dtype, mpi_reduction(call));
  });
  co_await end;
  work.give_back();
  finish_reduction(call, result, own / element);
  if (own > 0) std::memcpy(call.output, result, own);
}

}  // namespace horoplug
