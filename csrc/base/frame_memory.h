// Memory for the frames of coroutines: it keeps the memory of those that have ended for the next
// ones, so that collectives that recur allocate nothing.
//
// A coroutine whose first argument has a function frame_memory() takes its frame from there; see
// Task::promise_type. One thread at a time uses it, and all frames end before it does.
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <new>

#include "base/pool_allocator.h"

namespace horoplug {

class FrameMemory {
 public:
  void* take(std::size_t bytes) {
    const std::size_t kind = kind_of(bytes);
    void* const block = kind < pools_.size() ? pools_[kind].take(block_bytes(kind))
                                             : ::operator new(block_bytes(kind));
    return frame_in(block, this);
  }
  // For a coroutine without such an argument.
  static void* take_elsewhere(std::size_t bytes) {
    return frame_in(::operator new(sizeof(Header) + bytes), nullptr);
  }
  // `bytes`: as when it was taken.
  static void give(void* frame, std::size_t bytes) noexcept {
    Header* const header = static_cast<Header*>(frame) - 1;
    const std::size_t kind = kind_of(bytes);
    if (header->owner == nullptr || kind >= kKinds) return ::operator delete(header);
    header->owner->pools_[kind].give(header, block_bytes(kind));
  }

 private:
  // Lies before each frame, which it leaves aligned.
  struct alignas(std::max_align_t) Header {
    FrameMemory* owner;  // nullptr: none
  };
  static void* frame_in(void* block, FrameMemory* owner) { return ::new (block) Header{owner} + 1; }

  static constexpr std::size_t kStep = 128;  // bytes by which the kinds of frames differ
  static constexpr std::size_t kKinds = 32;  // larger frames are not kept
  static constexpr std::size_t kind_of(std::size_t bytes) { return (bytes - 1) / kStep; }
  static constexpr std::size_t block_bytes(std::size_t kind) {
    return sizeof(Header) + (kind + 1) * kStep;
  }

  std::array<BlockPool, kKinds> pools_;
};

template <typename T>
concept HasFrameMemory = requires(T& owner) {
  { owner.frame_memory() } -> std::same_as<FrameMemory&>;
};

}  // namespace horoplug
