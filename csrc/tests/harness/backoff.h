// How a thread waits for other processes: it busy-waits, then yields, and then sleeps.
//
// A rank that busy-waits on a core that its peer needs delays itself by a time slice, and waking a
// sleeping thread takes several microseconds. Yielding takes less than one, and costs nothing if
// every rank has a core.
#pragma once

#include <sched.h>

#include <chrono>

namespace horoplug {

class Backoff {
 public:
  // How long the thread yields before it should sleep.
  static constexpr std::chrono::microseconds kYieldTime{500};
  static constexpr int kSpins = 20;

  // Starts again with busy-waiting, because the awaited peer has made progress.
  void reset() { turns_ = 0; }

  // Pauses or yields once. Returns false immediately if the thread should sleep instead.
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
