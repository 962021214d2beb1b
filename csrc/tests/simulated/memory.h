// The allocations of the simulated GPUs: device memory, which is host memory here, pinned memory
// and registered memory.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <string>

#include "tests/simulated/named_memory.h"

namespace horoplug::testing::simulated {

enum class MemoryKind {
  kDevice,      // cuMemAlloc
  kPool,        // cuMemAllocAsync
  kImported,    // opened from another process, or freed by its owner while others have it open
  kPinned,      // cuMemHostAlloc
  kRegistered,  // memory of the program, by cuMemHostRegister
};

// Its address stays valid after the memory is freed, so that streams can count their uses in it
// without a lock.
struct Allocation {
  MemoryKind kind = MemoryKind::kDevice;
  int device = 0;
  std::byte* data = nullptr;
  std::size_t bytes = 0;
  std::string name;              // by which other processes open it; empty: not exportable
  bool in_named_memory = false;  // whether `data` is a NamedMemory region
  std::atomic<int> uses{0};      // by enqueued work
  int opened = 0;                // how often it was opened by name, or registered
  bool freed = false;            // whether `data` is invalid

  bool holds(std::uintptr_t address, std::size_t size) const {
    const auto begin = reinterpret_cast<std::uintptr_t>(data);
    return address >= begin && size <= bytes && address - begin <= bytes - size;
  }
};

class Memory {
 public:
  // `limit`: the memory of each device, in bytes.
  Memory(NamedMemory& named_memory, std::size_t limit)
      : named_memory_(named_memory), limit_(limit) {}
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  // Returns nullptr if the memory is exhausted.
  Allocation* allocate(MemoryKind kind, int device, std::size_t bytes);
  // Returns the allocation that contains this address, or nullptr.
  Allocation* find(std::uintptr_t address);
  // Removes the allocation of one of two kinds that begins at this address, so that find() no
  // longer returns it, and returns it; nullptr if there is none. The caller then calls release().
  // If others have opened the allocation, it stays and becomes kImported.
  Allocation* remove(std::uintptr_t address, MemoryKind kind, MemoryKind other_kind);
  // Frees the memory, unless others have it open. Takes no lock, because streams call it.
  void release(Allocation& allocation);

  // Opens an allocation by the name in an IPC handle; nullptr if it does not exist.
  Allocation* open(const std::string& name, std::size_t bytes, int device);
  // Returns false if it was not open.
  bool close(std::uintptr_t address);

  // Registers memory of the program. In contrast to CUDA, memory can be registered several times,
  // because ranks can be threads, each of which registers it.
  void register_host(std::byte* data, std::size_t bytes);
  // Returns false if the memory was not registered. Sets `used` if the last registration ends while
  // a stream still uses the memory.
  bool unregister_host(std::uintptr_t address, bool& used);

  std::size_t alive();
  std::size_t used(int device) const { return used_[device].load(std::memory_order_relaxed); }

 private:
  Allocation& record(MemoryKind kind, int device, std::size_t bytes, std::byte* data);

  NamedMemory& named_memory_;
  std::size_t limit_;
  std::mutex mutex_;
  std::deque<Allocation> all_;
  std::map<std::uintptr_t, Allocation*> live_;  // by address
  std::map<std::string, Allocation*> by_name_;
  std::atomic<std::size_t> used_[8] = {};
  unsigned numbers_ = 0;
};

}  // namespace horoplug::testing::simulated
