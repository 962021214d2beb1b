// Finds out that a thread shares its processor with the peer that wakes it, though there are
// others.
//
// Kernels place a thread that is woken near the one that wakes it. Two ranks that do nothing but
// wait for each other then stay on one processor: only one of them can run at any time, so that a
// load balancer finds nothing to move, and spinning never pays, since the peer cannot run
// meanwhile. A small operation takes two context switches instead of two accesses to a cache line.
//
// Where ranks outnumber processors, there is a similar trap: three ranks on one processor and one
// on the other. All of them are always runnable, since they yield instead of sleeping, and the load
// balancer looks rarely at processors that are busy: a small operation takes half as long again for
// a tenth of a second. So each rank has a home among the processors.
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

// Where a rank runs that only waits for others, if ranks outnumber the processors. Its processor
// may be needed by threads that compute; then operations do not follow each other closely.
class HomeProcessor {
 public:
  static constexpr int kInARow = 64;  // operations elsewhere, which take at most
  static constexpr Seconds kWithin{10e-3};
  // The least time between two moves. It doubles while moves do not last.
  static constexpr Seconds kLeastPause{10e-3};
  static constexpr Seconds kMostPause{10};
  static constexpr Seconds kLasts{100e-3};

  // Ranks for each processor, at most.
  static constexpr int kMostRanks = 4;

  // -1: it has none.
  explicit HomeProcessor(int home = -1) : home_(home) {}

  int number() const { return home_; }
  // An operation of this rank has ended at `time` on processor `here`. Whether it should go home.
  bool ended(int here, SteadyTime time) {
    if (home_ < 0 || here == home_) {
      elsewhere_ = 0;
      return false;
    }
    if (elsewhere_ == 0) since_ = time;
    if (++elsewhere_ < kInARow) return false;
    elsewhere_ = 0;
    const Seconds ago = time - moved_at_;
    if (time - since_ > kWithin || ago < pause_) return false;
    pause_ = ago > std::max(kLasts, 2 * pause_) ? kLeastPause : std::min(2 * pause_, kMostPause);
    moved_at_ = time;
    return true;
  }

 private:
  int home_;
  int elsewhere_ = 0;  // operations in a row
  SteadyTime since_;
  Seconds pause_ = kLeastPause;
  SteadyTime moved_at_ = kLongAgo;
};

// The home of the rank with this place among the ranks of its host, which are distributed evenly
// over the processors. -1: none, because there are so many ranks that an uneven distribution
// matters little, or because this thread may not run on all processors: those of other ranks are
// not known.
int home_of(int place, int ranks);

// Moves the calling thread from this processor to another one that it may run on, if there is one.
void leave_processor(int processor);
// Moves it to this processor, which it may run on.
void go_to_processor(int processor);

}  // namespace horoplug
