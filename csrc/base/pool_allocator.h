// An allocator for containers of nodes, such as hash tables: it keeps the memory of erased elements
// for the next ones. A table whose elements come and go therefore allocates nothing once it has had
// its largest size.
//
// Copies of an allocator share their memory. A container and its copies are used by one thread at a
// time.
#pragma once

#include <cstddef>
#include <memory>
#include <new>
#include <vector>

namespace horoplug {

// Blocks of one size: that of the first one that is given back.
class BlockPool {
 public:
  BlockPool() = default;
  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;
  ~BlockPool() {
    for (void* block : free_) ::operator delete(block);
  }

  void* take(std::size_t bytes) {
    if (bytes != bytes_ || free_.empty()) return ::operator new(bytes);
    void* const block = free_.back();
    free_.pop_back();
    return block;
  }
  void give(void* block, std::size_t bytes) noexcept {
    if (bytes_ == 0) bytes_ = bytes;
    if (bytes != bytes_ || free_.size() == kMost) return ::operator delete(block);
    try {
      free_.push_back(block);
    } catch (...) {
      ::operator delete(block);
    }
  }

 private:
  static constexpr std::size_t kMost = 4096;  // more than a step has operations
  std::size_t bytes_ = 0;
  std::vector<void*> free_;
};

template <typename T>
class PoolAllocator {
 public:
  using value_type = T;

  PoolAllocator() : pool_(std::make_shared<BlockPool>()) {}
  template <typename U>
  PoolAllocator(const PoolAllocator<U>& other) : pool_(other.pool()) {}  // NOLINT(*-explicit-*)

  T* allocate(std::size_t count) {
    static_assert(alignof(T) <= __STDCPP_DEFAULT_NEW_ALIGNMENT__);
    void* const memory = count == 1 ? pool_->take(sizeof(T)) : ::operator new(count * sizeof(T));
    return static_cast<T*>(memory);
  }
  void deallocate(T* memory, std::size_t count) noexcept {
    if (count == 1) return pool_->give(static_cast<void*>(memory), sizeof(T));
    ::operator delete(static_cast<void*>(memory));
  }

  const std::shared_ptr<BlockPool>& pool() const { return pool_; }
  template <typename U>
  bool operator==(const PoolAllocator<U>& other) const {
    return pool_ == other.pool();
  }

 private:
  std::shared_ptr<BlockPool> pool_;
};

}  // namespace horoplug
