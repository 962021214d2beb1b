#include "engine/loop/progress_loop.h"

#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace horoplug {

bool has_fewer_processors_than(int threads, double quota) {
  if (quota > 0 && quota < threads) return true;
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  return ::sched_getaffinity(0, sizeof cpus, &cpus) == 0 && CPU_COUNT(&cpus) < threads;
}

namespace {

// Moves the calling thread to one of the processors that choose(allowed) leaves.
template <typename Choose>
void move_within(Choose&& choose) {
  cpu_set_t allowed, chosen;
  CPU_ZERO(&allowed);
  if (::sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  chosen = allowed;
  choose(chosen);
  if (CPU_COUNT(&chosen) == 0 || ::sched_setaffinity(0, sizeof chosen, &chosen) != 0) return;
  // Allows the thread what it was allowed before, and leaves it where it is.
  ::sched_setaffinity(0, sizeof allowed, &allowed);
}

}  // namespace

void leave_processor(int processor) {
  if (processor < 0) return;
  move_within([&](cpu_set_t& set) { CPU_CLR(static_cast<std::size_t>(processor), &set); });
}

void go_to_processor(int processor) {
  if (processor < 0) return;
  move_within([&](cpu_set_t& set) {
    const bool may_run = CPU_ISSET(static_cast<std::size_t>(processor), &set);
    CPU_ZERO(&set);
    if (may_run) CPU_SET(static_cast<std::size_t>(processor), &set);
  });
}

int home_of(int place, int ranks) {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (::sched_getaffinity(0, sizeof allowed, &allowed) != 0) return -1;
  const int count = CPU_COUNT(&allowed);
  if (count != ::sysconf(_SC_NPROCESSORS_ONLN) || ranks > HomeProcessor::kMostRanks * count) {
    return -1;
  }
  int left = place % count;
  for (int processor = 0; processor < CPU_SETSIZE; ++processor) {
    if (CPU_ISSET(static_cast<std::size_t>(processor), &allowed) && left-- == 0) return processor;
  }
  return -1;
}

void spin_pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  // YIELD does nothing on processors whose cores run one thread each. ISB empties the pipeline,
  // which takes about as long as PAUSE.
  asm volatile("isb" ::: "memory");
#endif
}

bool LoopOwnership::acquire() {
  if (held_.load(std::memory_order_relaxed) || held_.exchange(true)) return false;
  doorbell_.finish_sleep();
  return true;
}

void LoopOwnership::release(Seconds time) {
  const SteadyTime needed = steady_now() + time;
  held_.store(false);
  poller_.unmute();
  if (needed < dozes_until_.load()) poller_.kick();
}

void LoopOwnership::release_before_doze(Seconds time) {
  dozes_until_ = steady_now() + time;
  held_.store(false);
  poller_.unmute();
}

bool LoopOwnership::acquire_before_doze(Seconds time) {
  poller_.mute();
  dozes_until_ = steady_now() + time;
  return acquire();
}

}  // namespace horoplug
