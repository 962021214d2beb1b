// How long a cache line takes from one processor to another and back, in nanoseconds: the median of
// short series between the first and the last processor that this process may use. Virtual machines
// change between a state in which their processors share a cache and one in which they do not,
// where this takes several times as long. Benchmarks record it (benchmarks/harness/machine.py).
// Ends with status 1 if there is one processor only.
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdio>
#include <thread>
#include <vector>

#include "base/cache_line.h"
#include "base/time.h"

namespace horoplug {
namespace {

constexpr int kSeries = 31;
constexpr unsigned kTrips = 100;  // in each series

struct alignas(2 * kCacheLine) Flag {
  std::atomic<unsigned> number = 0;

  void wait_for(unsigned wanted) const {
    while (number.load(std::memory_order_acquire) != wanted) {
    }
  }
};

void stay_on(std::size_t processor) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(processor, &set);
  ::pthread_setaffinity_np(::pthread_self(), sizeof set, &set);
}

double nanoseconds_between(std::size_t here, std::size_t there) {
  std::array<Flag, 2> flags;
  std::atomic<bool> ready = false;
  std::thread other([&] {
    stay_on(there);
    ready = true;
    for (unsigned i = 1; i <= kSeries * kTrips; ++i) {
      flags[0].wait_for(i);
      flags[1].number.store(i, std::memory_order_release);
    }
  });
  stay_on(here);
  while (!ready) ::sched_yield();
  std::array<double, kSeries> series;
  unsigned number = 0;
  for (double& each : series) {
    const SteadyTime start = steady_now();
    for (unsigned i = 0; i < kTrips; ++i) {
      flags[0].number.store(++number, std::memory_order_release);
      flags[1].wait_for(number);
    }
    each = Seconds(steady_now() - start).count() / kTrips * 1e9;
  }
  other.join();
  std::ranges::nth_element(series, series.begin() + kSeries / 2);
  return series[kSeries / 2];
}

}  // namespace
}  // namespace horoplug

int main() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (::sched_getaffinity(0, sizeof allowed, &allowed) != 0) return 1;
  std::vector<std::size_t> processors;
  for (std::size_t i = 0; i < CPU_SETSIZE; ++i) {
    if (CPU_ISSET(i, &allowed)) processors.push_back(i);
  }
  if (processors.size() < 2) {
    std::fprintf(stderr, "there is one processor only\n");
    return 1;
  }
  std::printf("%.0f\n", horoplug::nanoseconds_between(processors.front(), processors.back()));
}
