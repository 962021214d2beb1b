// Barrier by MPI's own algorithms. It cannot be the one by which ranks meet in a plan: MPI takes
// nothing back.
#include "collectives/mpi/common.h"

namespace horoplug {

Task barrier_mpi(Comm& comm, Call&) {
  MpiEnd end(comm, [](Mpi& mpi) { return mpi.barrier(); });
  co_await end;
}

}  // namespace horoplug
