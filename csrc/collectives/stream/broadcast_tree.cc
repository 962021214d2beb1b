// Broadcast down a tree, chunk by chunk: a binomial tree for few bytes, a chain for many (where a
// rank sends every byte once only, and the pipeline hides the chain's length).
#include <deque>

#include "collectives/collective.h"
#include "collectives/partition.h"

namespace horoplug {
namespace {

constexpr std::size_t kWindow = 8;

struct Place {
  int parent = -1;
  std::vector<int> children;
};

// Ranks are counted from the root on. A rank's parent is found by clearing its lowest bit.
Place binomial(int rank, int size, int root) {
  const int me = (rank - root + size) % size;
  Place place;
  const int lowest = me & -me;
  if (me != 0) place.parent = (me - lowest + root) % size;
  int bit = 1;
  while (bit < (me == 0 ? size : lowest)) bit *= 2;
  // The child with the largest subtree first.
  for (bit /= 2; bit > 0; bit /= 2) {
    if (me + bit < size) place.children.push_back((me + bit + root) % size);
  }
  return place;
}

Place chain(int rank, int size, int root) {
  const int me = (rank - root + size) % size;
  Place place;
  if (me > 0) place.parent = (rank + size - 1) % size;
  if (me + 1 < size) place.children.push_back((rank + 1) % size);
  return place;
}

Task broadcast_along(Comm& comm, Call& call, Place place) {
  Layout& layout = *call.layout;
  const Part whole{0, layout.bytes()};
  std::byte* work = layout.contiguous_output();
  if (work == nullptr) work = comm.scratch(Scratch::kWork, whole.bytes);
  if (place.parent < 0) layout.pack(0, whole.bytes, work);

  std::deque<Link::Receive> posted;
  std::size_t next_post = 0;
  const std::size_t chunks = chunk_count(whole.bytes, Comm::kChunkBytes);
  for (std::size_t i = 0; i < chunks; ++i) {
    const Part chunk = chunk_of(whole, i, Comm::kChunkBytes);
    if (place.parent >= 0) {
      for (; next_post < chunks && next_post < i + kWindow; ++next_post) {
        const Part next = chunk_of(whole, next_post, Comm::kChunkBytes);
        comm.post(posted, place.parent, work + next.begin, next.bytes);
      }
      co_await posted.front();
      posted.pop_front();
    }
    for (const int child : place.children) comm.send(child, work + chunk.begin, chunk.bytes);
  }
  co_await comm.flushed();
  layout.unpack(0, whole.bytes, work);
}

}  // namespace

Task broadcast_tree(Comm& comm, Call& call) {
  return broadcast_along(comm, call, binomial(comm.rank(), comm.size(), call.root));
}

Task broadcast_chain(Comm& comm, Call& call) {
  return broadcast_along(comm, call, chain(comm.rank(), comm.size(), call.root));
}

}  // namespace horoplug
