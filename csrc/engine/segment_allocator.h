// Offsets in the ranks' shared-memory segments.
#pragma once

#include <cstddef>
#include <map>
#include <set>

#include "base/by_rank.h"
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
    auto& free = free_[rank][size];
    if (!free.empty()) return {free.extract(free.begin()).value(), true};
    std::size_t& end = ends_[rank];
    end += size;
    return {end - size, false};
  }
  // No rank uses this memory any more.
  void free(int rank, std::size_t offset, std::size_t bytes) {
    free_[rank][rounded(bytes)].insert(offset);
  }

 private:
  static constexpr std::size_t kPage = 4096;
  static std::size_t rounded(std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

  ByRank<std::size_t> ends_;  // the number of bytes that were ever in use
  ByRank<std::map<std::size_t, std::set<std::size_t>>> free_;  // by size: offsets
};

}  // namespace horoplug
