// Offsets in the ranks' shared-memory segments.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "transport/shm/transfer_slots.h"

namespace horoplug {

// Every rank reserves memory in the same order, so that all ranks agree on each offset without
// telling each other. Offsets are never used again: some rank may still use what was there. Used by
// the thread that runs the loop.
class SegmentAllocator {
 public:
  // The first part of every segment belongs to the set of all ranks, the second one to transfers
  // between two ranks.
  explicit SegmentAllocator(std::size_t ranks) : ends_(ranks, TransferSlots::kEnd) {}

  // Reserves memory in the segment of a rank; returns its offset.
  std::size_t reserve(int rank, std::size_t bytes) {
    std::size_t& end = ends_[static_cast<std::size_t>(rank)];
    return std::exchange(end, end + (bytes + kPage - 1) / kPage * kPage);
  }

 private:
  static constexpr std::size_t kPage = 4096;
  std::vector<std::size_t> ends_;  // by rank: the number of bytes in use
};

}  // namespace horoplug
