// How long a thread looks for more work before it sleeps.
//
// To sleep and be woken costs several microseconds on both sides, so that spinning pays if what is
// waited for comes within that time. It never comes if the peer needs this very processor, or is
// busy for longer. Hence the budget follows what the last attempts have brought: it doubles when
// spinning has paid and halves when it has not, down to nothing but a try now and then.
#pragma once

namespace horoplug {

class SpinBudget {
 public:
  static constexpr double kMost = 50e-6;  // seconds
  static constexpr double kLeast = 5e-6;
  static constexpr double kTry = 20e-6;
  static constexpr int kRests = 16;  // waits without a spin between two tries

  // How long to spin this time.
  double next() {
    if (budget_ > 0) return budget_;
    if (++rests_ < kRests) return 0;
    rests_ = 0;
    return kTry;
  }
  // Something came while it span.
  void paid() { budget_ = 2 * budget_ < kMost ? (budget_ > 0 ? 2 * budget_ : kTry) : kMost; }
  // Nothing did.
  void wasted() { budget_ = budget_ / 2 < kLeast ? 0 : budget_ / 2; }

 private:
  double budget_ = kMost;
  int rests_ = 0;
};

}  // namespace horoplug
