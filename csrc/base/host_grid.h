// The ranks of a process set by host.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace horoplug {

// Hosts are numbered in the order of their first ranks. The local rank is the index of a rank among
// the ranks of its host.
class HostGrid {
 public:
  // hosts[i]: an arbitrary number that identifies the host of rank i of the set.
  explicit HostGrid(std::span<const int> hosts);

  int size() const { return static_cast<int>(host_.size()); }
  int hosts() const { return static_cast<int>(members_.size()); }
  // The ranks of each host, by local rank.
  const std::vector<std::vector<int>>& members() const { return members_; }
  // The smallest and the largest number of ranks on a host.
  int fewest() const { return fewest_; }
  int most() const { return most_; }
  bool even() const { return fewest_ == most_; }

  int host(int rank) const { return host_[static_cast<std::size_t>(rank)]; }
  int local_rank(int rank) const { return local_rank_[static_cast<std::size_t>(rank)]; }
  // The ranks of the same host, by local rank.
  const std::vector<int>& host_ranks(int rank) const {
    return members_[static_cast<std::size_t>(host(rank))];
  }
  // The ranks of all hosts with this local rank, by host. Requires local_rank < fewest().
  std::vector<int> cross_ranks(int local_rank) const;

 private:
  std::vector<std::vector<int>> members_;
  std::vector<int> host_;
  std::vector<int> local_rank_;
  int fewest_ = 0;
  int most_ = 0;
};

}  // namespace horoplug
