#include "tests/simulated/memory.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>

namespace horoplug::testing::simulated {
namespace {

// New and freed memory is filled with unlikely values, so that tests notice reads of it. Only the
// beginning of large allocations is filled.
constexpr std::size_t kMaxPoisonedBytes = 1 << 20;
constexpr int kNewByte = 0xA5, kFreedByte = 0xDB;

void poison(std::byte* data, std::size_t bytes, int value) {
  std::memset(data, value, std::min(bytes, kMaxPoisonedBytes));
}

}  // namespace

Memory::~Memory() {
  for (Allocation& one : all_) {
    if (one.freed) continue;
    if (!one.in_named_memory && one.kind != MemoryKind::kRegistered) std::free(one.data);
    if (one.kind == MemoryKind::kDevice) named_memory_.remove(one.name);
  }
}

Allocation& Memory::record(MemoryKind kind, int device, std::size_t bytes, std::byte* data) {
  Allocation& made = all_.emplace_back();
  made.kind = kind;
  made.device = device;
  made.data = data;
  made.bytes = bytes;
  live_[reinterpret_cast<std::uintptr_t>(data)] = &made;
  return made;
}

Allocation* Memory::allocate(MemoryKind kind, int device, std::size_t bytes) {
  const bool on_device = kind != MemoryKind::kPinned;
  auto& used = used_[device];
  const std::lock_guard lock(mutex_);
  if (on_device && (bytes > limit_ || used.load(std::memory_order_relaxed) > limit_ - bytes)) {
    return nullptr;
  }
  const std::string name = kind == MemoryKind::kDevice ? "memory-" + std::to_string(::getpid()) +
                                                             "-" + std::to_string(numbers_++)
                                                       : "";
  const bool in_named_memory = named_memory_.is_shared() && !name.empty();
  void* place = nullptr;
  if (in_named_memory) {
    place = named_memory_.open(name, bytes);
  } else if (::posix_memalign(&place, kAlignment, std::max<std::size_t>(bytes, 1)) != 0) {
    return nullptr;
  }
  if (place == nullptr) return nullptr;
  auto* const data = static_cast<std::byte*>(place);
  poison(data, bytes, kNewByte);
  if (on_device) used.fetch_add(bytes, std::memory_order_relaxed);
  Allocation& made = record(kind, device, bytes, data);
  made.name = name;
  made.in_named_memory = in_named_memory;
  if (!name.empty()) by_name_[name] = &made;
  return &made;
}

Allocation* Memory::find(std::uintptr_t address) {
  const std::lock_guard lock(mutex_);
  const auto after = live_.upper_bound(address);
  if (after == live_.begin()) return nullptr;
  Allocation* const found = std::prev(after)->second;
  return found->holds(address, 1) ? found : nullptr;
}

Allocation* Memory::remove(std::uintptr_t address, MemoryKind kind, MemoryKind other_kind) {
  const std::lock_guard lock(mutex_);
  const auto found = live_.find(address);
  if (found == live_.end()) return nullptr;
  Allocation* const taken = found->second;
  if (taken->kind != kind && taken->kind != other_kind) return nullptr;
  if (taken->opened > 0) {
    taken->kind = MemoryKind::kImported;  // it stays valid for those that have opened it
    return taken;
  }
  live_.erase(found);
  std::erase_if(by_name_, [&](const auto& entry) { return entry.second == taken; });
  return taken;
}

void Memory::release(Allocation& allocation) {
  if (allocation.kind != MemoryKind::kPinned) {
    used_[allocation.device].fetch_sub(allocation.bytes, std::memory_order_relaxed);
  }
  if (allocation.kind == MemoryKind::kImported) return;
  poison(allocation.data, allocation.bytes, kFreedByte);
  allocation.freed = true;
  if (!allocation.in_named_memory) return std::free(allocation.data);
  named_memory_.remove(allocation.name);
  named_memory_.close(allocation.name);
}

Allocation* Memory::open(const std::string& name, std::size_t bytes, int device) {
  const std::lock_guard lock(mutex_);
  const auto known = by_name_.find(name);
  if (known != by_name_.end()) {
    ++known->second->opened;
    return known->second;
  }
  if (!named_memory_.is_shared()) return nullptr;
  std::byte* const data = named_memory_.open(name, bytes, false);
  if (data == nullptr) return nullptr;
  Allocation& made = record(MemoryKind::kImported, device, bytes, data);
  made.name = name;
  made.in_named_memory = true;
  made.opened = 1;
  by_name_[name] = &made;
  return &made;
}

bool Memory::close(std::uintptr_t address) {
  const std::lock_guard lock(mutex_);
  const auto found = live_.find(address);
  if (found == live_.end() || found->second->opened == 0) return false;
  Allocation& closed = *found->second;
  if (--closed.opened == 0 && closed.kind == MemoryKind::kImported) {
    closed.freed = true;
    if (closed.in_named_memory) {
      named_memory_.close(closed.name);
    } else {
      poison(closed.data, closed.bytes, kFreedByte);
      std::free(closed.data);
    }
    by_name_.erase(closed.name);
    live_.erase(found);
  }
  return true;
}

void Memory::register_host(std::byte* data, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto known = live_.find(reinterpret_cast<std::uintptr_t>(data));
  Allocation& own =
      known != live_.end() ? *known->second : record(MemoryKind::kRegistered, 0, bytes, data);
  ++own.opened;
}

bool Memory::unregister_host(std::uintptr_t address, bool& used) {
  const std::lock_guard lock(mutex_);
  const auto found = live_.find(address);
  if (found == live_.end() || found->second->kind != MemoryKind::kRegistered) return false;
  if (--found->second->opened > 0) return true;
  used = found->second->uses.load(std::memory_order_relaxed) > 0;
  live_.erase(found);
  return true;
}

std::size_t Memory::alive() {
  const std::lock_guard lock(mutex_);
  return live_.size();
}

}  // namespace horoplug::testing::simulated
