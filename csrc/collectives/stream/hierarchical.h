// What the hierarchical algorithms and their costs share.
//
// Ranks with the same local rank, one per host, exchange a slice of the data between the hosts.
// There are as many slices as the host with the fewest ranks has.
#pragma once

#include <cstddef>

#include "base/host_grid.h"
#include "transport/shm/arena.h"

namespace horoplug {

// The bytes of an allreduce that are reduced at once between the hosts, while others are moved in
// the memory of the hosts: large enough that each slice makes good use of the network.
inline std::size_t hierarchical_block(const HostGrid& hosts) {
  constexpr std::size_t kSlice = 4 * Arena::kSlotBytes;
  return static_cast<std::size_t>(hosts.fewest()) * kSlice;
}

}  // namespace horoplug
