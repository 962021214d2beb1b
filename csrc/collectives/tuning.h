// The settings that the tuner changes while a job runs (controller/tuner.h). A batch has the same
// ones on all ranks.
#pragma once

#include <cstdint>

namespace horoplug {

struct Tuning {
  static constexpr std::int64_t kLeastChunk = 4 << 10;
  static constexpr std::int64_t kMostChunk = 256 << 10;

  std::int64_t bucket_bytes = 8 << 20;    // the most that a plan's batch has
  std::int64_t chunk_bytes = kMostChunk;  // of the chunks in which data travels; of whole lines
  std::int64_t lanes = 1 << 10;           // connections to a rank that are used, if there are more
  std::int64_t latency_percent = 100;     // of what was measured at the start between hosts: the
                                          // more, the larger the calls that take the fewest steps

  bool operator==(const Tuning&) const = default;
};

}  // namespace horoplug
