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
#include <utility>

namespace horoplug {

class FrameMemory {
 public:
  FrameMemory() = default;
  FrameMemory(const FrameMemory&) = delete;
  FrameMemory& operator=(const FrameMemory&) = delete;
  ~FrameMemory() {
    for (Block* block : free_) {
      while (block != nullptr) ::operator delete(std::exchange(block, block->next));
    }
  }

  // A frame of any size. The block before it knows where it belongs.
  void* take(std::size_t bytes) {
    const std::size_t kind = kind_of(bytes);
    Block* block = kind < free_.size() ? free_[kind] : nullptr;
    if (block != nullptr) {
      free_[kind] = block->next;
    } else {
      block = static_cast<Block*>(::operator new(sizeof(Block) + (kind + 1) * kStep));
    }
    block->owner = this;
    return block + 1;
  }
  static void* take_elsewhere(std::size_t bytes) {
    auto* const block = static_cast<Block*>(::operator new(sizeof(Block) + bytes));
    block->owner = nullptr;
    return block + 1;
  }
  static void give(void* frame, std::size_t bytes) noexcept {
    Block* const block = static_cast<Block*>(frame) - 1;
    FrameMemory* const owner = block->owner;
    const std::size_t kind = kind_of(bytes);
    if (owner == nullptr || kind >= owner->free_.size()) return ::operator delete(block);
    block->next = std::exchange(owner->free_[kind], block);
  }

 private:
  union Block {
    FrameMemory* owner;  // of a frame in use; nullptr: none
    Block* next;         // of one that is free
    std::max_align_t aligned;
  };
  static constexpr std::size_t kStep = 128;  // bytes by which the kinds of frames differ
  static constexpr std::size_t kind_of(std::size_t bytes) { return (bytes - 1) / kStep; }

  std::array<Block*, 32> free_{};  // by size; larger frames are not kept
};

template <typename T>
concept HasFrameMemory = requires(T& owner) {
  { owner.frame_memory() } -> std::same_as<FrameMemory&>;
};

}  // namespace horoplug
