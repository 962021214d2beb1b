// Small exchanges among the ranks of a set, within a larger operation.
#pragma once

#include <type_traits>
#include <vector>

#include "collectives/comm.h"

namespace horoplug {

// A barrier: returns when every rank has called it.
Task barrier(Comm& comm);

// Allgather of parts of one size, a few bytes. `all`: room for `bytes` of each rank, in rank order.
// Afterwards the batch is committed, since every rank has joined it.
Task allgather_fixed_bytes(Comm& comm, const void* mine, std::size_t bytes, void* all);

template <typename T>
Task allgather_fixed(Comm& comm, const T& mine, std::vector<T>& all) {
  static_assert(std::is_trivially_copyable_v<T>);
  all.resize(static_cast<std::size_t>(comm.size()));
  return allgather_fixed_bytes(comm, &mine, sizeof mine, all.data());
}

}  // namespace horoplug
