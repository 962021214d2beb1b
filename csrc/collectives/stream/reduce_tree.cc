// Reduce up a tree, chunk by chunk: a binomial tree for few bytes, a chain for many (where a rank
// sends every byte once only, and the pipeline hides the length of the chain).
//
// A rank combines its own elements with those of its children in one call of the kernel, in the
// order of the tree, so that the result has the same bits in every run.
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

constexpr std::size_t kReduceWindow = 4;

Task reduce_along(Comm& comm, Call& call, TreeNeighbours tree) {
  Layout& layout = *call.layout;
  const Part whole{0, layout.bytes()};
  const bool is_root = tree.parent < 0;
  // The outputs of other ranks are not written.
  std::byte* work = is_root ? layout.contiguous_output() : nullptr;
  if (work == nullptr) work = comm.scratch(Scratch::kWork, whole.bytes);
  const std::size_t children = tree.children.size();
  const std::size_t chunk_bytes = comm.chunk_bytes();
  std::byte* const arrivals =
      comm.scratch(Scratch::kReceive, kReduceWindow * children * chunk_bytes);
  const auto arrival = [&](std::size_t chunk, std::size_t child) {
    return arrivals + (chunk % kReduceWindow * children + child) * chunk_bytes;
  };

  std::deque<Link::Receive> posted;
  std::size_t next_post = 0;
  std::vector<const void*> sources(1 + children);
  const std::size_t chunks = chunk_count(whole.bytes, chunk_bytes);
  for (std::size_t i = 0; i < chunks; ++i) {
    for (; next_post < chunks && next_post < i + kReduceWindow; ++next_post) {
      const Part next = chunk_of(whole, next_post, chunk_bytes);
      for (std::size_t child = 0; child < children; ++child) {
        comm.post(posted, tree.children[child], arrival(next_post, child), next.bytes);
      }
    }
    const Part chunk = chunk_of(whole, i, chunk_bytes);
    std::byte* const own = work + chunk.begin;
    layout.pack(chunk.begin, chunk.bytes, own);
    sources[0] = own;
    for (std::size_t child = 0; child < children; ++child) {
      co_await posted.front();
      posted.pop_front();
      sources[1 + child] = arrival(i, child);
    }
    if (children > 0) {
      call.reduce(own, sources.data(), static_cast<int>(sources.size()), chunk.bytes / call.grain(),
                  is_root ? call.finish : Finish{});
    }
    if (!is_root) comm.send(tree.parent, own, chunk.bytes);
  }
  co_await comm.flushed();
  if (is_root) layout.unpack(0, whole.bytes, work);
}

}  // namespace

Task reduce_tree(Comm& comm, Call& call) {
  return reduce_along(comm, call, binomial_tree(comm, call.root));
}

Task reduce_chain(Comm& comm, Call& call) {
  return reduce_along(comm, call, chain(comm, call.root));
}

}  // namespace horoplug
