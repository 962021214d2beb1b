// Finds out that a thread shares its processor with the peer that wakes it, though there are
// others.
//
// Kernels place a thread that is woken near the one that wakes it. Two ranks that do nothing but
// wait for each other then stay on one processor: only one of them can run at any time, so that a
// load balancer finds nothing to move, and spinning never pays, since the peer cannot run
// meanwhile. A small operation takes two context switches instead of two accesses to a cache line.
#pragma once

#include <algorithm>
#include <utility>

#include "base/time.h"

namespace horoplug {

class SharedProcessor {
 public:
  static constexpr int kInARow = 8;
  // The least time between two moves. It doubles while moves do not help: other threads may need
  // the other processors.
  static constexpr Seconds kLeastPause{10e-3};
  static constexpr Seconds kMostPause{10};
  // A move has helped if the thread ran elsewhere for so long.
  static constexpr Seconds kHelps{5e-3};

  // This thread was woken at `time` on processor `here`, by a thread on processor `ringer` (-1: by
  // none). Whether it should move to another processor.
  bool woken(int ringer, int here, SteadyTime time) {
    in_a_row_ = ringer == here ? in_a_row_ + 1 : 0;
    if (in_a_row_ < kInARow) return false;
    if (!std::exchange(judged_, true)) {
      const bool helped = time - moved_at_ > kHelps;
      pause_ = helped ? kLeastPause : std::min(2 * pause_, kMostPause);
    }
    if (time - moved_at_ < pause_) return false;
    in_a_row_ = 0;
    judged_ = false;
    moved_at_ = time;
    return true;
  }

 private:
  int in_a_row_ = 0;
  Seconds pause_ = kLeastPause;
  SteadyTime moved_at_ = kLongAgo;
  bool judged_ = false;  // whether the last move has helped is known
};

// Moves the calling thread from this processor to another one that it may run on, if there is one.
void leave_processor(int processor);

}  // namespace horoplug
