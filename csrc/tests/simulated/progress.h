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

using Progress = std::atomic<std::uint32_t>;

inline bool reached(const Progress& progress, std::uint32_t target) {
  return static_cast<std::int32_t>(progress.load(std::memory_order_acquire) - target) >= 0;
}

inline void wake(Progress& progress) {
  ::syscall(SYS_futex, &progress, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

inline void raise_to(Progress& progress, std::uint32_t to) {
  progress.store(to, std::memory_order_release);
  wake(progress);
}

// Waits until the number has reached `target`, or give_up() says so, which is asked every few
// milliseconds. Whether it has been reached.
template <typename GiveUp>
bool wait_for(Progress& progress, std::uint32_t target, const GiveUp& give_up) {
  while (!reached(progress, target)) {
    if (give_up()) return false;
    const std::uint32_t seen = progress.load(std::memory_order_relaxed);
    if (static_cast<std::int32_t>(seen - target) >= 0) continue;
    timespec pause{0, 3'000'000};
    ::syscall(SYS_futex, &progress, FUTEX_WAIT, seen, &pause, nullptr, 0);
  }
  return true;
}

}  // namespace horoplug::testing::simulated
