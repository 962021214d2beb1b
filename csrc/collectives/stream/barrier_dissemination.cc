// Barrier by dissemination: in round k a rank tells the one 2^k after it (Hensgen, Finkel and
// Manber, "Two algorithms for barrier synchronization", 1988).
#include "collectives/collective.h"

namespace horoplug {

Task barrier_dissemination(Comm& comm, Call&) {
  for (int distance = 1; distance < comm.size(); distance *= 2) {
    comm.send((comm.rank() + distance) % comm.size(), nullptr, 0);
    Link::Receive told =
        comm.receive((comm.rank() + comm.size() - distance) % comm.size(), nullptr, 0);
    co_await told;
  }
  co_await comm.flushed();
}

}  // namespace horoplug
