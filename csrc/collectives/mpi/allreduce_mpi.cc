// Allreduce by MPI's own algorithms.
//
// All ranks get the same bits: each element is reduced by one rank for all, or by all in pairs,
// where the order of the two does not matter. But which of two NaNs survives does depend on it, and
// so does a minimum with NaNs, for which MPI is not asked.
#include <algorithm>

#include "collectives/mpi/common.h"

namespace horoplug {

Task allreduce_mpi(Comm& comm, Call& call) {
  Layout& layout = *call.layout;
  const std::size_t element = dtype_size(call.dtype);
  const std::size_t most = Mpi::kMostElements * element;
  Comm::Lent work(comm, Scratch::kMpi, layout.bytes());
  layout.pack(0, layout.bytes(), work.data());
  for (std::size_t at = 0; at < layout.bytes(); at += most) {
    const std::size_t elements = std::min(most, layout.bytes() - at) / element;
    MpiEnd end(comm, [&](Mpi& mpi) {
      return mpi.allreduce(work.data() + at, elements, call.dtype, mpi_reduction(call));
    });
    co_await end;
  }
  work.give_back();
  finish_reduction(call, work.data(), layout.elements());
  layout.unpack(0, layout.bytes(), work.data());
}

}  // namespace horoplug
