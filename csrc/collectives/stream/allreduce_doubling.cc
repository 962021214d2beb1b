// Allreduce by recursive doubling: log2(p) exchanges of the whole buffer, for messages whose cost
// is latency (Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations
// in MPICH", 2005).
//
// Ranks beyond the largest power of two first fold their data into a neighbour and receive the
// result at the end. Values are always combined in the order of the ranks that they represent, so
// that every rank computes the same bits.
#include <bit>

#include "collectives/collective.h"
#include "collectives/stream/exchange.h"

namespace horoplug {
Task allreduce_doubling(Comm& comm, Call& call) {
  Layout& layout = *call.layout;
  const std::size_t bytes = layout.bytes();
  const std::size_t grains = bytes / call.grain();
  // Not in the output, which must stay unchanged until every rank is known to take part.
  std::byte* const work = comm.scratch(Scratch::kWork, bytes);
  std::byte* const theirs = comm.scratch(Scratch::kReceive, bytes);
  layout.pack(0, bytes, work);

  const int rank = comm.rank();
  const int groups = static_cast<int>(std::bit_floor(static_cast<unsigned>(comm.size())));
  const int folded = comm.size() - groups;  // ranks 2i and 2i+1, for i < folded, act as one
  const bool in_pair = rank < 2 * folded;
  const auto leader_of = [&](int group) { return group < folded ? 2 * group : group + folded; };
  const auto combine = [&](bool mine_first, const Finish& finish) {
    const void* const sources[] = {mine_first ? work : theirs, mine_first ? theirs : work};
    call.reduce(work, sources, 2, grains, finish);
  };

  if (in_pair && rank % 2 == 1) {
    send_all(comm, rank - 1, work, bytes);
    co_await comm.flushed();
    co_await receive_all(comm, rank - 1, work, bytes);
  } else {
    if (in_pair) {
      co_await receive_all(comm, rank + 1, theirs, bytes);
      combine(true, groups == 1 ? call.finish : Finish{});
    }
    const int group = in_pair ? rank / 2 : rank - folded;
    for (int distance = 1; distance < groups; distance *= 2) {
      const int partner = group ^ distance;
      send_all(comm, leader_of(partner), work, bytes);
      co_await receive_all(comm, leader_of(partner), theirs, bytes);
      co_await comm.flushed();  // the result replaces data that was being sent
      combine(group < partner, 2 * distance == groups ? call.finish : Finish{});
    }
    if (in_pair) send_all(comm, rank + 1, work, bytes);
    co_await comm.flushed();
  }
  layout.unpack(0, bytes, work);
}

}  // namespace horoplug
