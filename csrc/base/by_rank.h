// A vector with an element for each rank of a job. Ranks are `int`, as in MPI.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

namespace horoplug {

template <typename T>
class ByRank : public std::vector<T> {
 public:
  using Values = std::vector<T>;
  using Values::operator[];
  using Values::Values;
  explicit ByRank(Values values) : Values(std::move(values)) {}
  decltype(auto) operator[](int rank) { return (*this)[static_cast<std::size_t>(rank)]; }
  decltype(auto) operator[](int rank) const { return (*this)[static_cast<std::size_t>(rank)]; }
};

}  // namespace horoplug
