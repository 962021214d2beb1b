// How long a thread looks for more work before it sleeps.
//
// Sleeping and waking up cost both sides a few microseconds, or hundreds where a hypervisor has to
// bring back an idle processor. Spinning for as long as that costs is at most twice as expensive as
// the best decision with foresight (Karlin, Li, Manasse, Owicki: Empirical studies of competitive
// spinning for a shared-memory multiprocessor, SOSP 1991). Spinning is wasted if the peer needs
// this processor, or is busy for longer. So the budget follows the last attempts: it doubles when
// spinning has paid and halves when it has not, down to zero with an occasional try. Ranks that all
// sleep wait for each other's wake-ups. To end that, a try is as long as the last sleeps, and the
// budget after it suffices for as long a wait, until the peer tries, too.
//
// Where ranks outnumber the processors, a thread yields instead, which costs those nothing that
// have work to do. Its budget is larger: ranks that sleep leave processors idle, from which it
// takes others long to come back, so that the waits of all exceed a small budget and all go on
// sleeping.
#pragma once

#include <algorithm>
#include <utility>

#include "base/time.h"

namespace horoplug {

class SpinBudget {
 public:
  // Unless a longer wait has paid.
  static constexpr Seconds kMost{200e-6};
  static constexpr Seconds kMostYielding{1e-3};
  static constexpr Seconds kLeast{5e-6};
  static constexpr Seconds kTry{20e-6};
  static constexpr Seconds kLongestTry{1500e-6};
  static constexpr int kRests = 16;  // waits without spinning between two tries

  explicit SpinBudget(Seconds most = kMost) : most_(most), budget_(most) {}

  // There is nothing to do at `time`. Whether to look again at once instead of sleeping.
  bool spin(SteadyTime time) {
    if (!waiting_) begin(time, time + next());
    if (time < until_) return true;
    if (!std::exchange(slept_, true) && until_ > since_) budget_ = less(budget_);
    return false;
  }
  // There is something to do.
  void found(SteadyTime time) {
    if (!std::exchange(waiting_, false)) return;
    if (slept_) {
      sleeps_ += (std::min(time - until_, 2 * kLongestTry) - sleeps_) / 4;
    } else {
      budget_ = std::min(2 * (until_ - since_), std::max(most_, 2 * (time - since_)));
    }
  }
  // This wait may not spin: an earlier part of it has.
  void skip(SteadyTime time) {
    begin(time, time);
    slept_ = true;
  }
  // What the last attempts have shown does not hold any more.
  void renew() { budget_ = std::max(budget_, most_); }
  // The present wait is over without a result.
  void forget() { waiting_ = false; }
  bool waiting() const { return waiting_; }

 private:
  void begin(SteadyTime time, SteadyTime until) {
    waiting_ = true;
    slept_ = false;
    since_ = time;
    until_ = until;
  }
  Seconds next() {
    if (budget_ > Seconds::zero()) return budget_;
    if (++rests_ < kRests) return Seconds::zero();
    rests_ = 0;
    // A little longer than the sleeps that it is to replace.
    const Seconds wanted = 1.5 * sleeps_;
    return wanted > kLongestTry ? kTry : std::max(wanted, kTry);
  }
  static Seconds less(Seconds budget) { return budget / 2 < kLeast ? Seconds::zero() : budget / 2; }

  const Seconds most_;
  Seconds budget_;
  Seconds sleeps_ = kTry;  // a moving average of the length of sleeps, limited to 2 * kLongestTry
  int rests_ = 0;
  // The present wait.
  bool waiting_ = false;
  bool slept_ = false;
  SteadyTime since_;
  SteadyTime until_;
};

}  // namespace horoplug
