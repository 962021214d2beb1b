#include "device/cuda/runtime/tables_on_device.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace horoplug::cuda {
namespace {

// A total of one MiB.
constexpr std::size_t kChunksAtOnce = (1 << 20) / sizeof(Chunk);

// Word by word: this runs before every launch.
std::uint64_t hash_of(std::span<const Chunk> chunks) {
  std::uint64_t hash = chunks.size();
  const auto add = [&hash](std::uint64_t word) {
    hash = (std::rotl(hash, 29) ^ word) * 0x9E3779B97F4A7C15;
  };
  for (const Chunk& chunk : chunks) {
    add(chunk.from);
    add(chunk.to);
    add(chunk.count);
    add(std::uint64_t{chunk.first_tile} << 32 | chunk.flags);
  }
  return hash;
}

}  // namespace

TablesOnDevice::TablesOnDevice(const Context& context, CUstream stream, std::size_t slots)
    : context_(context), stream_(stream), limit_(slots) {
  pinned(0);
}

// Reuses present memory if it is large enough.
std::span<Chunk> TablesOnDevice::pinned(std::size_t chunks) {
  if (pinned_.empty() || free_pinned_.size() < chunks) {
    const std::size_t count = std::max(chunks, kChunksAtOnce);
    pinned_.push_back(std::make_unique<PinnedMemory>(context_, count * sizeof(Chunk)));
    free_pinned_ = {reinterpret_cast<Chunk*>(pinned_.back()->data()), count};
  }
  const std::span<Chunk> memory = free_pinned_.first(chunks);
  free_pinned_ = free_pinned_.subspan(chunks);
  return memory;
}

TablesOnDevice::Slot::Slot(const Context& context, std::span<Chunk> memory, CUstream stream)
    : capacity(memory.size()),
      host(memory.data()),
      device(context, memory.size_bytes(), stream),
      copied(context) {}

bool TablesOnDevice::Slot::holds(std::span<const Chunk> chunks, std::uint64_t its_hash) const {
  return hash == its_hash && count == chunks.size() &&
         std::memcmp(host, chunks.data(), chunks.size_bytes()) == 0;
}

const Chunk* TablesOnDevice::place(std::span<const Chunk> chunks) {
  const std::uint64_t hash = hash_of(chunks);
  const auto known = std::find_if(slots_.begin(), slots_.end(),
                                  [&](const auto& slot) { return slot->holds(chunks, hash); });
  const bool is_known = known != slots_.end();
  Slot& slot = is_known ? **known : slot_for(chunks.size());
  slot.last_use = ++uses_;
  const Chunk* const address = std::bit_cast<const Chunk*>(slot.device.address());
  if (is_known) return address;
  std::memcpy(slot.host, chunks.data(), chunks.size_bytes());
  slot.count = 0;  // holds nothing if the copy fails
  const Current current(context_);
  context_.check(context_.api().MemcpyHtoDAsync(slot.device.address(), slot.host,
                                                chunks.size_bytes(), stream_),
                 "cuMemcpyHtoDAsync");
  slot.copied.record(stream_);
  slot.count = chunks.size();
  slot.hash = hash;
  ++copies_;
  return address;
}

TablesOnDevice::Slot& TablesOnDevice::slot_for(std::size_t chunks) {
  if (slots_.size() >= limit_) {
    // The least recently used slot whose copy has been made.
    std::sort(slots_.begin(), slots_.end(),
              [](const auto& a, const auto& b) { return a->last_use < b->last_use; });
    for (const auto& slot : slots_) {
      if (slot->capacity >= chunks && slot->copied.done()) return *slot;
    }
  }
  const std::size_t capacity = std::max<std::size_t>(std::bit_ceil(chunks), 64);
  slots_.push_back(std::make_unique<Slot>(context_, pinned(capacity), stream_));
  return *slots_.back();
}

}  // namespace horoplug::cuda
