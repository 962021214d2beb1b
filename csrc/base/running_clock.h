// A clock that does not count the time in which this process was stopped, suspended or without a
// processor.
//
// The limits of waits for other ranks are measured with it. In such a time, the process could not
// look at what its peers did, so that the peers must not be blamed for it. A gap between two
// readings of the clock shows it.
#pragma once

#include <chrono>

#include "base/time.h"

namespace horoplug {

class RunningClock;
using RunningTime = std::chrono::time_point<RunningClock, Seconds>;

// Used by one thread at a time.
class RunningClock {
 public:
  // `source`: the time without a gap, for tests.
  explicit RunningClock(SteadyTime (*source)() = steady_now) : source_(source) {}

  // From now on, a reading is due every `interval`. If one is late by more than `tolerance`, the
  // time by which it is late is left out.
  void expect_readings(Seconds interval, Seconds tolerance) {
    interval_ = interval;
    tolerance_ = tolerance;
  }
  // The next reading may come at any time, which counts: there is nothing to look at before.
  void expect_a_long_gap() { may_be_late_ = true; }

  RunningTime now() { return at(source_()); }
  // Reads the clock at a time that is not earlier than that of the last reading.
  RunningTime at(SteadyTime now) {
    const Seconds late = now - last_reading_ - interval_;
    if (late > tolerance_ && !may_be_late_) left_out_ += late;
    may_be_late_ = false;
    last_reading_ = now;
    return RunningTime(now.time_since_epoch() - left_out_);
  }

 private:
  SteadyTime (*source_)();
  Seconds interval_ = kForever;
  Seconds tolerance_{};
  bool may_be_late_ = false;
  SteadyTime last_reading_;
  Seconds left_out_{};
};

}  // namespace horoplug
