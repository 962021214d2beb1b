// Calls MPI from one thread, for an MPI that grants less than MPI_THREAD_MULTIPLE.
//
// Callers do not wait for that thread: calls are queued in order, and test() returns what the
// thread has found. The thread progresses requests when test() is called, and sleeps otherwise.
// Exceptions of MPI calls are rethrown by test().
//
// Memory that is passed to a call, arguments included, must stay valid until the request has ended.
#pragma once

#include <memory>

#include "base/worker.h"
#include "transport/mpi/mpi.h"

namespace horoplug {

// `worker` makes all calls of `mpi` except finalized().
std::shared_ptr<Mpi> make_funnel(std::shared_ptr<Mpi> mpi, std::shared_ptr<Worker> worker);

}  // namespace horoplug
