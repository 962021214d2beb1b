// Time that does not count for the limits of waits.
#pragma once

#include <algorithm>

namespace horoplug {

// A period in which this process could not look at what its peers do: it was stopped, or got no
// processor. In seconds of the steady clock.
struct LostTime {
  double begin;
  double end;

  double seconds() const { return end - begin; }
  // Moves the begin of a wait by the part of the period that belongs to the wait.
  void extend(double& since) const { since += std::max(0.0, end - std::max(begin, since)); }
};

}  // namespace horoplug
