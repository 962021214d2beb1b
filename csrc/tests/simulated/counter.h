// Waiting for a number that grows, also in another process.
//
// Order goes one way: from who advances the number to who waits for it. Locks would order both, so
// that ThreadSanitizer would not see a wait for an event that is missing.
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

// Waits until the number has reached `target`, or give_up() says so, which is asked every few
// milliseconds. Whether it has been reached.
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
