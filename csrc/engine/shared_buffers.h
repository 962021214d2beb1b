// Buffers that ranks of one host share, and the operations that work in them without a copy.
//
// A buffer is created by an operation on all ranks, so that every rank gives it the same number and
// offset. Each rank releases it by itself, with its last user there.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "engine/operations/operation.h"
#include "engine/options.h"
#include "engine/segment_allocator.h"

namespace horoplug {

class SharedBuffers {
 public:
  SharedBuffers(const EngineConfig& config, SegmentAllocator& segments)
      : config_(config), segments_(segments) {}

  // ---- called by any thread

  // Throws Error(HP_INVALID_ARGUMENT) if there can be no buffer of this size.
  static void check_size(std::uint64_t bytes);
  // The buffer that contains all tensors of an operation; nullptr if there is none, or if the
  // operation cannot work in place.
  std::shared_ptr<SharedBuffer> find(const Operation& operation) const;

  // ---- the thread that runs the loop

  // Does a kAddBuffer operation: creates the buffer.
  void create(Operation& operation);

 private:
  const EngineConfig& config_;
  SegmentAllocator& segments_;

  std::atomic<bool> any_{false};  // whether there has ever been a buffer
  // Under the lock.
  mutable std::mutex mutex_;
  std::map<const std::byte*, std::weak_ptr<SharedBuffer>> buffers_;  // by where they begin

  // Used by the thread that runs the loop.
  std::uint32_t last_number_ = 0;
};

}  // namespace horoplug
