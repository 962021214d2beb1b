// How long a thread looks for more work before it sleeps.
//
// To sleep and be woken costs both sides something: a few microseconds, or a hundred where an idle
// processor is one that a hypervisor has to bring back. Spinning for as long as that costs is never
// worse than twice the best that one could have done with foresight (Karlin, Li, Manasse, Owicki:
// Empirical studies of competitive spinning for a shared-memory multiprocessor, SOSP 1991). It is
// in vain if the peer needs this very processor, or is busy for longer. Hence the budget follows
// what the last attempts have brought: it doubles when spinning has paid and halves when it has
// not, down to nothing but a try now and then. That try is as long as the last sleeps were: ranks
// that all sleep make each other wait for their waking up, and would never come out of it with
// less.
#pragma once

#include <algorithm>
#include <utility>

namespace horoplug {

class SpinBudget {
 public:
  static constexpr double kMost = 200e-6;  // seconds
  static constexpr double kLeast = 5e-6;
  static constexpr double kTry = 20e-6;
  static constexpr int kRests = 16;  // waits without a spin between two tries

  // At `time` nothing is to be done: whether to look again at once, instead of sleeping.
  bool spin(double time) {
    if (!waiting_) begin(time, time + next());
    if (time < until_) return true;
    if (!std::exchange(slept_, true) && until_ > since_) budget_ = less(budget_);
    return false;
  }
  // Something is to be done.
  void found(double time) {
    if (!std::exchange(waiting_, false)) return;
    if (slept_) {
      sleeps_ += (std::min(time - until_, 2 * kMost) - sleeps_) / 4;
    } else {
      budget_ = std::min(2 * (until_ - since_), kMost);
    }
  }
  // This wait has had its spin.
  void skip(double time) {
    begin(time, time);
    slept_ = true;
  }
  // What was waited for is not waited for any more.
  void forget() { waiting_ = false; }
  bool waiting() const { return waiting_; }

 private:
  void begin(double time, double until) {
    waiting_ = true;
    slept_ = false;
    since_ = time;
    until_ = until;
  }
  double next() {
    if (budget_ > 0) return budget_;
    if (++rests_ < kRests) return 0;
    rests_ = 0;
    // A little more than what it is to catch.
    const double wanted = 1.5 * sleeps_;
    return wanted > kMost ? kTry : std::max(wanted, kTry);
  }
  static double less(double budget) { return budget / 2 < kLeast ? 0 : budget / 2; }

  double budget_ = kMost;
  double sleeps_ = kTry;  // how long they were, about, as far as that is within reach
  int rests_ = 0;
  // The present wait.
  bool waiting_ = false;
  bool slept_ = false;
  double since_ = 0;
  double until_ = 0;
};

}  // namespace horoplug
