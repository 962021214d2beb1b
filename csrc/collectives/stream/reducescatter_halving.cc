// Reduce-scatter by recursive halving: log2(p) rounds, in each of which two ranks divide the data
// that they have in common, and each reduces its half (Thakur, Rabenseifner and Gropp,
// "Optimization of collective communication operations in MPICH", 2005). For data whose cost is
// latency.
//
// Ranks beyond the largest power of two first fold their data into a neighbour and receive their
// part at the end. Of two operands, the one of the lower rank comes first. A part without bytes
// travels as an empty message: a rank has heard from every other one before it writes its output.
#include <bit>
#include <cstring>
#include <deque>

#include "collectives/collective.h"
#include "collectives/partition.h"
#include "collectives/stream/exchange.h"

namespace horoplug {
namespace {

// Receives a buffer and combines it with `data`, chunk by chunk.
Task receive_and_reduce(Comm& comm, const Call& call, int rank, std::byte* data, std::size_t bytes,
                        Finish finish) {
  const Part whole{0, bytes};
  std::byte* const theirs = comm.scratch(Scratch::kReceive, bytes);
  const std::size_t messages = messages_of(bytes);
  std::deque<Link::Receive> posted;
  for (std::size_t i = 0; i < messages; ++i) {
    const Part chunk = chunk_of(whole, i, Comm::kChunkBytes);
    comm.post(posted, rank, theirs + chunk.begin, chunk.bytes);
  }
  for (std::size_t i = 0; i < messages; ++i) {
    co_await posted.front();
    posted.pop_front();
    const Part chunk = chunk_of(whole, i, Comm::kChunkBytes);
    std::byte* const mine = data + chunk.begin;
    const bool mine_first = comm.rank() < rank;
    const void* const sources[] = {mine_first ? mine : theirs + chunk.begin,
                                   mine_first ? theirs + chunk.begin : mine};
    call.reduce(mine, sources, 2, chunk.bytes / call.grain(), finish);
  }
}

}  // namespace

Task reducescatter_halving(Comm& comm, Call& call) {
  Layout& layout = *call.layout;
  const std::size_t bytes = layout.bytes();
  const auto parts = consecutive(call.receive_bytes);
  const auto part_of = [&](int of) { return parts[static_cast<std::size_t>(of)]; };
  const int rank = comm.rank();
  const Part own = part_of(rank);
  std::byte* const work = comm.scratch(Scratch::kWork, bytes);
  layout.pack(0, bytes, work);

  const int groups = static_cast<int>(std::bit_floor(static_cast<unsigned>(comm.size())));
  const int folded = comm.size() - groups;  // ranks 2i and 2i+1, for i < folded, act as one
  const bool in_pair = rank < 2 * folded;
  const auto leader_of = [&](int group) { return group < folded ? 2 * group : group + folded; };
  const auto begin_of = [&](int group) {
    return group == groups ? bytes : part_of(leader_of(group)).begin;
  };

  if (in_pair && rank % 2 == 1) {
    send_even_if_empty(comm, rank - 1, work, bytes);
    co_await receive_even_if_empty(comm, rank - 1, call.output, own.bytes);
    co_await comm.flushed();
    co_return;
  }
  if (in_pair) co_await receive_and_reduce(comm, call, rank + 1, work, bytes, Finish{});

  const int group = in_pair ? rank / 2 : rank - folded;
  int first = 0;  // the groups whose data this rank still reduces: `first` … `first + distance`
  for (int distance = groups / 2; distance > 0; distance /= 2) {
    const std::size_t begin = begin_of(first);
    const std::size_t middle = begin_of(first + distance);
    const std::size_t end = begin_of(first + 2 * distance);
    const bool lower = group < first + distance;
    const int partner = leader_of(lower ? group + distance : group - distance);
    const std::size_t give = lower ? middle : begin;
    const std::size_t keep = lower ? begin : middle;
    const std::size_t given = lower ? end - middle : middle - begin;
    send_even_if_empty(comm, partner, work + give, given);
    co_await receive_and_reduce(comm, call, partner, work + keep, end - begin - given,
                                distance == 1 ? call.finish : Finish{});
    if (!lower) first += distance;
  }
  if (in_pair) {
    const Part& neighbours = part_of(rank + 1);
    send_even_if_empty(comm, rank + 1, work + neighbours.begin, neighbours.bytes);
  }
  co_await comm.flushed();
  if (own.bytes > 0) std::memcpy(call.output, work + own.begin, own.bytes);
}

}  // namespace horoplug
