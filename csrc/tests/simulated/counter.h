// A counter that only grows, and that threads of several processes can wait for.
//
// Advancing a counter happens before the return of a wait for it, and nothing else is ordered. A
// mutex would order both directions, and so hide a missing event wait from ThreadSanitizer.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>
#include <ctime>

namespace horoplug::testing::simulated {

using Counter = std::atomic<std::uint32_t>;

inline bool reached(const Counter& counter, std::uint32_t target) {
  return static_cast<std::int32_t>(counter.load(std::memory_order_acquire) - target) >= 0;
}

inline void wake(Counter& counter) {
  ::syscall(SYS_futex, &counter, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

inline void advance_to(Counter& counter, std::uint32_t to) {
  counter.store(to, std::memory_order_release);
  wake(counter);
}

// Waits until the counter has reached `target` or give_up() returns true, which is called every few
// milliseconds. Returns whether the counter has reached the target.
template <typename GiveUp>
bool wait_for(Counter& counter, std::uint32_t target, const GiveUp& give_up) {
  while (!reached(counter, target)) {
    if (give_up()) return false;
    const std::uint32_t seen = counter.load(std::memory_order_relaxed);
    if (static_cast<std::int32_t>(seen - target) >= 0) continue;
    timespec pause{0, 3'000'000};
    ::syscall(SYS_futex, &counter, FUTEX_WAIT, seen, &pause, nullptr, 0);
  }
  return true;
}

}  // namespace horoplug::testing::simulated
