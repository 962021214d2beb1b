// The tree along which a process set negotiates: ranks of one host meet at their first one, hosts
// at the first host.
#pragma once

#include <span>
#include <vector>

namespace horoplug {

struct TreePlace {
  int rank = 0;
  int parent = -1;  // -1: this is the root
  std::vector<int> children;
  std::vector<std::vector<int>> subtrees;  // for each child: itself and everyone below it

  bool is_root() const { return parent < 0; }
  // Ranks of the tree as seen from its root.
  std::size_t size() const {
    std::size_t count = 1;
    for (const auto& below : subtrees) count += below.size();
    return count;
  }
};

class Topology {
 public:
  static constexpr int kRadix = 8;

  // hosts[r]: the host of rank r; any numbers. The root is rank 0.
  explicit Topology(std::span<const int> hosts);

  TreePlace place(int rank) const;
  int size() const { return static_cast<int>(parents_.size()); }
  // The longest way from a rank to the root.
  int depth() const;

 private:
  void collect(int rank, std::vector<int>& ranks) const;
  std::vector<int> parents_;
  std::vector<std::vector<int>> children_;
};

}  // namespace horoplug
