// Who is in a process set.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace horoplug {

struct Members {
  std::uint32_t set = 0;
  std::vector<int> ranks;  // global, ascending
  int index = -1;          // this rank's place among them; -1: it is not in the set

  int size() const { return static_cast<int>(ranks.size()); }
  // The place of a global rank; -1 if it is not in the set.
  int index_of(int rank) const {
    const auto found = std::lower_bound(ranks.begin(), ranks.end(), rank);
    return found == ranks.end() || *found != rank ? -1 : static_cast<int>(found - ranks.begin());
  }
};

using MembersPtr = std::shared_ptr<const Members>;

inline MembersPtr make_members(std::uint32_t set, std::vector<int> ranks, int me) {
  auto members = std::make_shared<Members>(Members{set, std::move(ranks), -1});
  members->index = members->index_of(me);
  return members;
}

}  // namespace horoplug
