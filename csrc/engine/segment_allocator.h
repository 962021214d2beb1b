// Offsets in the ranks' shared-memory segments.
#pragma once

#include <cstddef>
#include <map>
#include <set>
#include <vector>

#include "transport/shm/transfer_slots.h"

namespace horoplug {

// Every rank reserves and frees memory in the same order, so that all ranks agree on each offset
// without telling each other. Used by the thread that runs the loop.
class SegmentAllocator {
 public:
  // The first part of every segment belongs to the set of all ranks, the second one to transfers
  // between two ranks.
  explicit SegmentAllocator(std::size_t ranks) : ends_(ranks, TransferSlots::kEnd), free_(ranks) {}

  struct Block {
    std::size_t offset;
    bool used_before;  // its owner has to clear it
  };
  // Reserves memory in the segment of a rank. Freed memory of the same size comes first.
  Block reserve(int rank, std::size_t bytes) {
    const std::size_t size = rounded(bytes);
    auto& free = free_[static_cast<std::size_t>(rank)][size];
    if (!free.empty()) return {free.extract(free.begin()).value(), true};
    std::size_t& end = ends_[static_cast<std::size_t>(rank)];
    end += size;
    return {end - size, false};
  }
  // No rank uses this memory any more.
  void free(int rank, std::size_t offset, std::size_t bytes) {
    free_[static_cast<std::size_t>(rank)][rounded(bytes)].insert(offset);
  }

 private:
  static constexpr std::size_t kPage = 4096;
  static std::size_t rounded(std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

  std::vector<std::size_t> ends_;  // by rank: the number of bytes that were ever in use
  std::vector<std::map<std::size_t, std::set<std::size_t>>> free_;  // by rank and size: offsets
};

}  // namespace horoplug
