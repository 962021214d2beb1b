// Broadcast down a tree, chunk by chunk: a binomial tree for few bytes, a chain for many (where a
// rank sends every byte once only, and the pipeline hides the chain's length).
//
// The binomial tree is that of Thakur, Rabenseifner and Gropp ("Optimization of collective
// communication operations in MPICH", 2005); the pipelined chain is described by Pjesivac-Grbovic
// et al. ("Performance analysis of MPI collective operations", 2007).
#include <deque>

#include "collectives/collective.h"
#include "collectives/partition.h"
#include "collectives/stream/tree.h"

namespace horoplug {
namespace {

constexpr std::size_t kBroadcastWindow = 8;

Task broadcast_along(Comm& comm, Call& call, TreeNeighbours tree) {
  Layout& layout = *call.layout;
  const Part whole{0, layout.bytes()};
  std::byte* work = layout.contiguous_output();
  if (work == nullptr) work = comm.scratch(Scratch::kWork, whole.bytes);
  if (tree.parent < 0) layout.pack(0, whole.bytes, work);

  std::deque<Link::Receive> posted;
  std::size_t next_post = 0;
  const std::size_t chunks = chunk_count(whole.bytes, Comm::kChunkBytes);
  for (std::size_t i = 0; i < chunks; ++i) {
    const Part chunk = chunk_of(whole, i, Comm::kChunkBytes);
    if (tree.parent >= 0) {
      for (; next_post < chunks && next_post < i + kBroadcastWindow; ++next_post) {
        const Part next = chunk_of(whole, next_post, Comm::kChunkBytes);
        comm.post(posted, tree.parent, work + next.begin, next.bytes);
      }
      co_await posted.front();
      posted.pop_front();
    }
    for (const int child : tree.children) comm.send(child, work + chunk.begin, chunk.bytes);
  }
  co_await comm.flushed();
  layout.unpack(0, whole.bytes, work);
}

}  // namespace

Task broadcast_tree(Comm& comm, Call& call) {
  return broadcast_along(comm, call, binomial_tree(comm, call.root));
}

Task broadcast_chain(Comm& comm, Call& call) {
  return broadcast_along(comm, call, chain(comm, call.root));
}

}  // namespace horoplug
