// Seconds of the steady clock, the unit of every time in the engine.
#pragma once

#include <chrono>
#include <limits>

namespace horoplug {

// A time limit that is never reached, or a point in time that never comes.
inline constexpr double kNever = std::numeric_limits<double>::infinity();

inline double steady_now() {
  using namespace std::chrono;
  return duration<double>(steady_clock::now().time_since_epoch()).count();
}

// Options and timeouts use a negative number for "never".
inline double or_never(double seconds) { return seconds < 0 ? kNever : seconds; }

}  // namespace horoplug
