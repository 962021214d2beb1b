#include "controller/topology.h"

#include <algorithm>
#include <unordered_map>

namespace horoplug {

namespace {

// Groups ranks by host, hosts in order of first appearance.
std::vector<std::vector<int>> by_host(std::span<const int> hosts) {
  std::unordered_map<int, std::size_t> host_index;
  std::vector<std::vector<int>> members;
  for (std::size_t rank = 0; rank < hosts.size(); ++rank) {
    const auto [entry, fresh] = host_index.try_emplace(hosts[rank], members.size());
    if (fresh) members.emplace_back();
    members[entry->second].push_back(static_cast<int>(rank));
  }
  return members;
}

}  // namespace

Topology::Topology(std::span<const int> hosts)
    : parents_(hosts.size(), -1), children_(hosts.size()) {
  const auto members = by_host(hosts);
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

TreePosition Topology::position(int rank) const {
  const auto index = static_cast<std::size_t>(rank);
  TreePosition position{rank, parents_[index], children_[index], {}};
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
    for (int at = rank; parents_[static_cast<std::size_t>(at)] >= 0;
         at = parents_[static_cast<std::size_t>(at)]) {
      ++steps;
    }
    deepest = std::max(deepest, steps);
  }
  return deepest;
}

HostGrid::HostGrid(std::span<const int> hosts) : members_(by_host(hosts)) {
  const bool even = std::all_of(members_.begin(), members_.end(), [this](const auto& ranks) {
    return ranks.size() == members_.front().size();
  });
  if (even && !members_.empty()) per_host_ = static_cast<int>(members_.front().size());
}

std::size_t HostGrid::host(int rank) const {
  const auto found = std::ranges::find_if(
      members_, [rank](const auto& ranks) { return std::ranges::count(ranks, rank) > 0; });
  return static_cast<std::size_t>(found - members_.begin());
}

const std::vector<int>& HostGrid::host_ranks(int rank) const { return members_[host(rank)]; }

int HostGrid::local_rank(int rank) const {
  const std::vector<int>& ranks = host_ranks(rank);
  return static_cast<int>(std::ranges::find(ranks, rank) - ranks.begin());
}

std::vector<int> HostGrid::cross_ranks(int rank) const {
  const auto at = static_cast<std::size_t>(local_rank(rank));
  std::vector<int> ranks;
  for (const auto& of_host : members_) ranks.push_back(of_host[at]);
  return ranks;
}

}  // namespace horoplug
