#include "engine/loop/progress_loop.h"

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

// The second call allows the thread what it was allowed before, and leaves it where it is.
void leave_processor(int processor) {
  cpu_set_t allowed, others;
  CPU_ZERO(&allowed);
  if (processor < 0 || ::sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  others = allowed;
  CPU_CLR(static_cast<std::size_t>(processor), &others);
  if (CPU_COUNT(&others) == 0 || ::sched_setaffinity(0, sizeof others, &others) != 0) return;
  ::sched_setaffinity(0, sizeof allowed, &allowed);
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
