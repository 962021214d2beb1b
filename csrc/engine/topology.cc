#include "engine/topology.h"

#include <algorithm>
#include <unordered_map>

namespace horoplug {

Topology::Topology(std::span<const int> hosts)
    : parents_(hosts.size(), -1), children_(hosts.size()) {
  std::unordered_map<int, std::size_t> host_index;
  std::vector<std::vector<int>> members;  // ranks by host, hosts in order of appearance
  for (std::size_t rank = 0; rank < hosts.size(); ++rank) {
    const auto [entry, fresh] = host_index.try_emplace(hosts[rank], members.size());
    if (fresh) members.emplace_back();
    members[entry->second].push_back(static_cast<int>(rank));
  }
  const auto connect = [this](int child, int parent) {
    parents_[static_cast<std::size_t>(child)] = parent;
    children_[static_cast<std::size_t>(parent)].push_back(child);
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
  for (const int child : children_[static_cast<std::size_t>(rank)]) collect(child, ranks);
}

TreePlace Topology::place(int rank) const {
  const auto index = static_cast<std::size_t>(rank);
  TreePlace place{rank, parents_[index], children_[index], {}};
  for (const int child : place.children) {
    std::vector<int> below;
    collect(child, below);
    std::sort(below.begin(), below.end());
    place.subtrees.push_back(std::move(below));
  }
  return place;
}

int Topology::depth() const {
  int deepest = 0;
  for (int rank = 0; rank < size(); ++rank) {
    int steps = 0;
    for (int at = rank; parents_[static_cast<std::size_t>(at)] >= 0;
         at = parents_[static_cast<std::size_t>(at)]) {
      ++steps;
    }
    deepest = std::max(deepest, steps);
  }
  return deepest;
}

}  // namespace horoplug
