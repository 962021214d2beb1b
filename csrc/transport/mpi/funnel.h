// MPI by way of one thread, for an MPI that grants less than MPI_THREAD_MULTIPLE.
//
// Whoever calls it does not wait for that thread: what is begun is only written down, in order, and
// test() says what the thread has found. The thread looks when somebody asks, and sleeps otherwise.
// What MPI throws there is thrown by test() here.
//
// Memory that is passed on, arguments included, has to stay until the request has ended.
#pragma once

#include <memory>

#include "base/worker.h"
#include "transport/mpi/mpi.h"

namespace horoplug {

// Calls of `mpi` are made by `worker`, all but finalized().
std::shared_ptr<Mpi> make_funnel(std::shared_ptr<Mpi> mpi, std::shared_ptr<Worker> worker);

}  // namespace horoplug
