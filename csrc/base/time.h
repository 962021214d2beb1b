// The types of times and durations in the engine and in its traces.
#pragma once

#include <chrono>
#include <cstdio>
#include <limits>
#include <string>

namespace horoplug {

using Seconds = std::chrono::duration<double>;
using SteadyTime = std::chrono::time_point<std::chrono::steady_clock, Seconds>;

// A time limit that is never reached.
inline constexpr Seconds kForever{std::numeric_limits<double>::infinity()};
// A point in time that never comes, and one before all others.
inline constexpr SteadyTime kNever{kForever};
inline constexpr SteadyTime kLongAgo{-kForever};

inline SteadyTime steady_now() { return std::chrono::steady_clock::now(); }

// "0.3 s", for messages.
inline std::string describe_seconds(Seconds seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g s", seconds.count());
  return text;
}

}  // namespace horoplug
