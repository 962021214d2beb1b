#include "collectives/stream/tree.h"

namespace horoplug {

// Ranks are counted from the root on. A rank's parent is found by clearing its lowest bit.
TreeNeighbours binomial_tree(int rank, int size, int root) {
  const int me = (rank - root + size) % size;
  TreeNeighbours tree;
  const int lowest = me & -me;
  if (me != 0) tree.parent = (me - lowest + root) % size;
  int bit = 1;
  while (bit < (me == 0 ? size : lowest)) bit *= 2;
  for (bit /= 2; bit > 0; bit /= 2) {
    if (me + bit < size) tree.children.push_back((me + bit + root) % size);
  }
  return tree;
}

TreeNeighbours chain(int rank, int size, int root) {
  const int me = (rank - root + size) % size;
  TreeNeighbours tree;
  if (me > 0) tree.parent = (rank + size - 1) % size;
  if (me + 1 < size) tree.children.push_back((rank + 1) % size);
  return tree;
}

}  // namespace horoplug
