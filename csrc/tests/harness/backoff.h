// How a thread waits for other processes that are about to do something: it looks again at once,
// then lets others have the core, and sleeps when that has not helped.
//
// A rank that spins on a core which the rank it waits for needs delays itself by a time slice, and
// waking a sleeper costs several microseconds. Yielding costs less than one, and nothing is lost
// by it where there is a core for everybody.
#pragma once

#include <sched.h>

#include <chrono>

namespace horoplug {

class Backoff {
 public:
  // For how long it yields before it sleeps.
  static constexpr std::chrono::microseconds kYieldTime{500};
  static constexpr int kSpins = 20;

  // Something has happened: hope is new.
  void reset() { turns_ = 0; }

  // Waits a moment. False, at once, if it is time to sleep instead.
  bool wait() {
    if (++turns_ <= kSpins) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
      return true;
    }
    const auto now = std::chrono::steady_clock::now();
    if (turns_ == kSpins + 1) until_ = now + kYieldTime;
    if (now >= until_) return false;
    ::sched_yield();
    return true;
  }

 private:
  int turns_ = 0;
  std::chrono::steady_clock::time_point until_;
};

}  // namespace horoplug
