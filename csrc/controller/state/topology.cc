#include "controller/state/topology.h"

#include <algorithm>

#include "base/host_grid.h"

namespace horoplug {

Topology::Topology(std::span<const int> hosts)
    : parents_(hosts.size(), -1), children_(hosts.size()) {
  const HostGrid grid(hosts);
  const auto& members = grid.members();
  const auto connect = [this](int child, int parent) {
    parents_[child] = parent;
    children_[parent].push_back(child);
  };
  for (std::size_t host = 0; host < members.size(); ++host) {
    for (std::size_t i = 1; i < members[host].size(); ++i) {
      connect(members[host][i], members[host][(i - 1) / kRadix]);
    }
    if (host > 0) connect(members[host][0], members[(host - 1) / kRadix][0]);
  }
}

void Topology::collect(int rank, std::vector<int>& ranks) const {
  ranks.push_back(rank);
  for (const int child : children_[rank]) collect(child, ranks);
}

TreePosition Topology::position(int rank) const {
  TreePosition position{rank, parents_[rank], children_[rank], {}};
  for (const int child : position.children) {
    std::vector<int> below;
    collect(child, below);
    std::sort(below.begin(), below.end());
    position.subtrees.push_back(std::move(below));
  }
  return position;
}

int Topology::depth() const {
  int deepest = 0;
  for (int rank = 0; rank < size(); ++rank) {
    int steps = 0;
    for (int at = rank; parents_[at] >= 0; at = parents_[at]) ++steps;
    deepest = std::max(deepest, steps);
  }
  return deepest;
}

}  // namespace horoplug
