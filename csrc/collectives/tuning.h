// The settings that the tuner changes while a job runs (controller/plans/tuner.h). They are equal
// on all ranks for a batch.
#pragma once

#include <cstdint>

namespace horoplug {

struct Tuning {
  static constexpr std::int64_t kLeastChunk = 4 << 10;
  static constexpr std::int64_t kMostChunk = 256 << 10;

  std::int64_t bucket_bytes = 8 << 20;  // upper limit for the batches of a plan
  // size of the chunks in which data is sent; whole cache lines
  std::int64_t chunk_bytes = kMostChunk;
  std::int64_t lanes = 1 << 10;        // limit for the connections used to one rank
  std::int64_t latency_percent = 100;  // of what was measured at the start between hosts: the
                                       // more, the larger the calls that take the fewest steps

  bool operator==(const Tuning&) const = default;
};

}  // namespace horoplug
