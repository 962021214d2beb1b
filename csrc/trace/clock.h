// The time base of traces: seconds of the steady clock, as everywhere in the engine.
#pragma once

#include <chrono>

namespace horoplug {

inline double trace_clock() {
  using namespace std::chrono;
  return duration<double>(steady_clock::now().time_since_epoch()).count();
}

}  // namespace horoplug
