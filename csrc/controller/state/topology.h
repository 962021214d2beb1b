// The tree along which a process set negotiates. The ranks of a host form a subtree below its first
// rank; the first ranks of the hosts form a tree below that of the first host.
#pragma once

#include <span>
#include <vector>

#include "base/by_rank.h"

namespace horoplug {

struct TreePosition {
  int rank = 0;
  int parent = -1;  // -1: this rank is the root
  std::vector<int> children;
  std::vector<std::vector<int>> subtrees;  // for each child: the child and all ranks below it

  bool is_root() const { return parent < 0; }
  // The number of ranks in the tree, as seen from its root.
  std::size_t size() const {
    std::size_t count = 1;
    for (const auto& below : subtrees) count += below.size();
    return count;
  }
};

class Topology {
 public:
  static constexpr int kRadix = 8;

  // hosts[r]: an arbitrary number that identifies the host of rank r. The root is rank 0.
  explicit Topology(std::span<const int> hosts);

  TreePosition position(int rank) const;
  int size() const { return static_cast<int>(parents_.size()); }
  // The largest number of edges between a rank and the root.
  int depth() const;

 private:
  void collect(int rank, std::vector<int>& ranks) const;
  ByRank<int> parents_;
  ByRank<std::vector<int>> children_;
};

}  // namespace horoplug
