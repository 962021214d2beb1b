// Allgather in ceil(log2(p)) rounds: in the round with distance d = 1, 2, 4, … a rank sends the
// parts that it has to the rank d before it, and gets as many from the rank d after it (Bruck, Ho,
// Kipnis, Upfal and Weathersby, "Efficient algorithms for all-to-all communications in multiport
// message-passing systems", 1997). For data whose cost is latency.
//
// Parts are kept in the order in which they come: this rank's own, then those of the ranks after
// it. What a round sends and what it receives are therefore one range each, whatever the sizes of
// the parts. The output is written at the end, when something has come from every rank: a range
// without bytes travels as an empty message.
#include <cstring>

#include "collectives/collective.h"
#include "collectives/stream/exchange.h"

namespace horoplug {

Task allgather_bruck(Comm& comm, Call& call) {
  const auto size = static_cast<std::size_t>(comm.size());
  const auto rank = static_cast<std::size_t>(comm.rank());
  const auto after = [&](std::size_t distance) { return (rank + distance) % size; };
  // begin[i]: where the part of the i-th rank from this one on begins.
  std::vector<std::size_t> begin(size + 1, 0);
  for (std::size_t i = 0; i < size; ++i) begin[i + 1] = begin[i] + call.receive_bytes[after(i)];
  std::byte* const work = comm.scratch(Scratch::kWork, begin[size]);
  if (begin[1] > 0) std::memcpy(work, call.input, begin[1]);

  for (std::size_t distance = 1; distance < size; distance *= 2) {
    const std::size_t count = std::min(distance, size - distance);
    const std::size_t next = begin[distance];
    send_even_if_empty(comm, static_cast<int>(after(size - distance)), work, begin[count]);
    co_await receive_even_if_empty(comm, static_cast<int>(after(distance)), work + next,
                                   begin[distance + count] - next);
  }
  co_await comm.flushed();

  const std::size_t from_here = begin[size - rank];  // bytes of this and higher ranks
  const std::size_t before = begin[size] - from_here;
  if (from_here > 0) std::memcpy(call.output + before, work, from_here);
  if (before > 0) std::memcpy(call.output, work + from_here, before);
}

}  // namespace horoplug
