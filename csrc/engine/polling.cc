#include "engine/polling.h"

#include <algorithm>

namespace horoplug {

bool Polling::needed() const {
  if (mesh_.must_poll() || !registry_.removed().empty() || point_to_point_.polled()) return true;
  return std::ranges::any_of(registry_.sets(), [this](const ProcessSet& set) {
    const bool ends = lifecycle_.leave_requested() || set.removal() != nullptr;
    return set.executor().polled() || (ends && set.executor().gpu() != nullptr);
  });
}

Seconds Polling::interval(SteadyTime now) const {
  constexpr double kPart = 1.0 / 16;
  constexpr Seconds kLeast{20e-6};
  constexpr Seconds kMost{5e-3};
  return std::clamp(kPart * (now - activity_.quiet_since), kLeast, kMost);
}

}  // namespace horoplug
