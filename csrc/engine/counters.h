// What hp_get_stats() reports about an engine. Written by the thread that runs the loop.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/time.h"

namespace horoplug {

struct Counters {
  using Count = std::atomic<std::uint64_t>;
  Count batches{0}, tensors{0}, bytes{0}, control_messages{0}, control_bytes{0}, cached_names{0},
      planned_batches{0}, broken_plans{0}, failed{0};
};

// The times of the engine's last progress. Used by the thread that runs the loop.
struct Activity {
  SteadyTime last_event{};   // an operation was submitted, decided or done
  SteadyTime quiet_since{};  // a batch made progress, or data came over a connection that is polled
};

}  // namespace horoplug
