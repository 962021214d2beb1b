// What ranks have to know of each other in the middle of something else.
#pragma once

#include <type_traits>
#include <vector>

#include "collectives/comm.h"

namespace horoplug {

// Returns when every rank has called it.
Task meet(Comm& comm);

// The same few bytes from every rank to every rank. all: `bytes` of each rank of the set, in their
// order.
Task gather_bytes(Comm& comm, const void* mine, std::size_t bytes, void* all);

template <typename T>
Task gather(Comm& comm, const T& mine, std::vector<T>& all) {
  static_assert(std::is_trivially_copyable_v<T>);
  all.resize(static_cast<std::size_t>(comm.size()));
  return gather_bytes(comm, &mine, sizeof mine, all.data());
}

}  // namespace horoplug
