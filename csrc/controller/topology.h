// The tree along which a process set negotiates: ranks of one host meet at their first one, hosts
// at the first host.
#pragma once

#include <span>
#include <vector>

namespace horoplug {

struct TreePosition {
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

  TreePosition position(int rank) const;
  int size() const { return static_cast<int>(parents_.size()); }
  // The longest way from a rank to the root.
  int depth() const;

 private:
  void collect(int rank, std::vector<int>& ranks) const;
  std::vector<int> parents_;
  std::vector<std::vector<int>> children_;
};

// The ranks of a set as a grid of hosts and places on a host, if every host has as many of them.
class HostGrid {
 public:
  // hosts[i]: the host of rank i of the set.
  explicit HostGrid(std::span<const int> hosts);

  int hosts() const { return static_cast<int>(members_.size()); }
  // How many ranks every host has; 0 if they are not as many everywhere.
  int per_host() const { return per_host_; }
  // Which one of its host a rank is.
  int local_rank(int rank) const;
  // The ranks of its host, by place.
  const std::vector<int>& host_ranks(int rank) const;
  // The ranks with the same place, by host; only if per_host() > 0.
  std::vector<int> cross_ranks(int rank) const;

 private:
  std::size_t host(int rank) const;

  std::vector<std::vector<int>> members_;  // by host, in order of appearance
  int per_host_ = 0;
};

}  // namespace horoplug
