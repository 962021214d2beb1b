// Trees of ranks along which data travels to or from a root.
#pragma once

#include <vector>

#include "collectives/comm.h"

namespace horoplug {

struct TreeNeighbours {
  int parent = -1;  // -1: this rank is the root
  std::vector<int> children;
};

// Both connect the ranks of each host among themselves, and each host but the root's to another
// host by one connection, so that data crosses a host's border once.

// Few steps: ceil(log2(hosts)) between hosts, then ceil(log2(ranks)) within them. The child with
// the largest subtree comes first, and other hosts before the ranks of this one.
TreeNeighbours binomial_tree(const Comm& comm, int root);

// Every rank has one child at most, so that it sends or receives each byte once only.
TreeNeighbours chain(const Comm& comm, int root);

}  // namespace horoplug
