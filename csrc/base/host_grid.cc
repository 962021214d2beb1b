#include "base/host_grid.h"

#include <algorithm>
#include <unordered_map>

namespace horoplug {

HostGrid::HostGrid(std::span<const int> hosts) {
  std::unordered_map<int, std::size_t> numbers;
  for (std::size_t rank = 0; rank < hosts.size(); ++rank) {
    const auto [entry, fresh] = numbers.try_emplace(hosts[rank], members_.size());
    if (fresh) members_.emplace_back();
    auto& of_host = members_[entry->second];
    host_.push_back(static_cast<int>(entry->second));
    local_rank_.push_back(static_cast<int>(of_host.size()));
    of_host.push_back(static_cast<int>(rank));
  }
  if (members_.empty()) return;
  const auto [fewest, most] = std::ranges::minmax_element(members_, {}, &std::vector<int>::size);
  fewest_ = static_cast<int>(fewest->size());
  most_ = static_cast<int>(most->size());
}

std::vector<int> HostGrid::cross_ranks(int local_rank) const {
  std::vector<int> ranks;
  for (const auto& of_host : members_) {
    ranks.push_back(of_host[static_cast<std::size_t>(local_rank)]);
  }
  return ranks;
}

}  // namespace horoplug
