// What a simulated GPU has handed out: its own memory, which is the host's, and pinned memory.
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
  kImported,    // another process's, or opened by its name and freed
  kPinned,      // the host's
  kRegistered,  // the program's own, which was registered
};

// It stays in place for good: streams note in it that they use it, and must not lock for that.
struct Allocation {
  MemoryKind kind = MemoryKind::kDevice;
  int device = 0;
  std::byte* data = nullptr;
  std::size_t bytes = 0;
  std::string name;              // that other processes open it by; empty: they cannot
  bool in_named_memory = false;  // see NamedMemory
  std::atomic<int> uses{0};      // by what is in streams
  int opened = 0;                // by its name, or registered: how often
  bool freed = false;            // the memory itself is

  bool holds(std::uintptr_t address, std::size_t size) const {
    const auto begin = reinterpret_cast<std::uintptr_t>(data);
    return address >= begin && size <= bytes && address - begin <= bytes - size;
  }
};

class Memory {
 public:
  // At most so many bytes on each device.
  Memory(NamedMemory& named_memory, std::size_t limit)
      : named_memory_(named_memory), limit_(limit) {}
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  // nullptr: out of memory.
  Allocation* allocate(MemoryKind kind, int device, std::size_t bytes);
  // The one that holds this address; nullptr if there is none.
  Allocation* find(std::uintptr_t address);
  // The one that begins there, which no longer counts from now on; nullptr if there is none of the
  // kind. wait_for_device() ends it, or leaves it to those that have opened it.
  Allocation* remove(std::uintptr_t address, MemoryKind kind, MemoryKind other_kind);
  // Takes no lock: streams call it.
  void release(Allocation& allocation);

  // By the name that a handle has. nullptr: there is none.
  Allocation* open(const std::string& name, std::size_t bytes, int device);
  // Whether it was open.
  bool close(std::uintptr_t address);

  // Memory of the program's own. Its ranks may be threads, and each of them registers it: unlike
  // CUDA, this allows that.
  void register_host(std::byte* data, std::size_t bytes);
  // Whether it was registered. `used`: and a stream still uses it, though nobody has it any more.
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
