// Trees of ranks along which data travels to or from a root.
#pragma once

#include <vector>

namespace horoplug {

struct TreeNeighbours {
  int parent = -1;  // -1: this rank is the root
  std::vector<int> children;
};

// Few steps: ceil(log2(size)). The child with the largest subtree comes first.
TreeNeighbours binomial_tree(int rank, int size, int root);

// Every rank has one child at most, so that it sends or receives each byte once only.
TreeNeighbours chain(int rank, int size, int root);

}  // namespace horoplug
