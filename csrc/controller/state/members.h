// The ranks of a process set.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "controller/state/tensor_states.h"

namespace horoplug {

struct Members {
  std::uint32_t set = 0;
  std::vector<int> ranks;  // ranks of the job, ascending
  int index = -1;          // this rank's index in `ranks`; -1 if it is not a member
  std::shared_ptr<TensorStates> states = std::make_shared<TensorStates>();

  int size() const { return static_cast<int>(ranks.size()); }
  // The index of a rank of the job; -1 if it is not a member.
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
