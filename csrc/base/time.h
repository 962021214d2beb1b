// Seconds of the steady clock: the unit of every time in the engine and in its traces.
#pragma once

#include <chrono>
#include <cstdio>
#include <limits>
#include <string>

namespace horoplug {

// A time limit that is never reached, or a point in time that never comes.
inline constexpr double kNever = std::numeric_limits<double>::infinity();

inline double steady_now() {
  using namespace std::chrono;
  return duration<double>(steady_clock::now().time_since_epoch()).count();
}

// Options and timeouts use a negative number for "never".
inline double or_never(double seconds) { return seconds < 0 ? kNever : seconds; }

// "0.3 s", for messages.
inline std::string describe_seconds(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g s", seconds);
  return text;
}

}  // namespace horoplug
