// Time that does not count for the limits of waits.
#pragma once

#include <algorithm>

#include "base/time.h"

namespace horoplug {

// A period in which this process could not look at what its peers do: it was stopped, or got no
// processor.
struct LostTime {
  SteadyTime begin;
  SteadyTime end;

  Seconds length() const { return end - begin; }
  // Moves the begin of a wait by the part of the period that belongs to the wait.
  void extend(SteadyTime& since) const {
    since += std::max(Seconds::zero(), end - std::max(begin, since));
  }
};

}  // namespace horoplug
