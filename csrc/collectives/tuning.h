// What may differ from one batch to the next, as long as it is the same on all ranks: the settings
// that are tuned while a job runs (controller/tuner.h).
#pragma once

#include <cstdint>

namespace horoplug {

struct Tuning {
  static constexpr std::int64_t kLeastChunk = 4 << 10;
  static constexpr std::int64_t kMostChunk = 256 << 10;

  std::int64_t bucket_bytes = 8 << 20;    // of a plan's batches, at most
  std::int64_t chunk_bytes = kMostChunk;  // of the pieces in which data travels; of whole lines
  std::int64_t lanes = 1 << 10;           // connections to a rank that are used, if there are more
  std::int64_t latency_percent = 100;     // of what was measured at the start between hosts: the
                                          // more, the larger the calls that take the fewest steps

  bool operator==(const Tuning&) const = default;
};

}  // namespace horoplug
