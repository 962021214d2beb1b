// What hp_get_stats() reports about an engine. Written by the thread that runs the loop.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/time.h"

namespace horoplug {

// Any thread may read it, and one thread at a time writes it: it needs no locked instruction.
class Count {
 public:
  operator std::uint64_t() const { return load(); }  // NOLINT(*-explicit-*)
  Count& operator=(std::uint64_t value) {
    value_.store(value, std::memory_order_relaxed);
    return *this;
  }
  Count& operator+=(std::uint64_t more) { return *this = load() + more; }
  Count& operator++() { return *this += 1; }

 private:
  std::uint64_t load() const { return value_.load(std::memory_order_relaxed); }
  std::atomic<std::uint64_t> value_{0};
};

struct Counters {
  Count batches, tensors, bytes, control_messages, control_bytes, cached_names, planned_batches,
      broken_plans, failed;
};

// The times of the engine's last progress. Used by the thread that runs the loop.
struct Activity {
  SteadyTime last_event{};   // an operation was submitted, decided or done
  SteadyTime quiet_since{};  // a batch made progress, or data came over a connection that is polled
};

}  // namespace horoplug
