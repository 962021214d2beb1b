#include "collectives/point_to_point.h"

#include <algorithm>
#include <array>

#include "collectives/partition.h"

namespace horoplug {
namespace {

constexpr auto kPaths = std::to_array({kCopyPath, kInlinePath, kDirectPath, kStreamPath});

// Up to here a copy into the message and out of it costs less than the two messages that it saves.
constexpr std::size_t kMostInline = 16 << 10;
// A receiver keeps offers for which it has no recv yet. So much of each sender's tensors is in them
// at most; further tensors stay with their sender until they are received.
constexpr std::size_t kMostUnanswered = 1 << 20;
// Below, the transfer consists of the messages before it, and a link wakes the receiver at no
// further cost.
constexpr std::size_t kLeastDirect = 256 << 10;
constexpr std::size_t kLeastChunk = 16 << 10;

}  // namespace

std::span<const TransferPath> transfer_paths() { return kPaths; }

bool fits_into_offer(const TransferProperties& properties) {
  const bool other_path =
      properties.forced == kDirectPath.name || properties.forced == kStreamPath.name;
  return properties.bytes <= kMostInline &&
         properties.unanswered + properties.bytes <= kMostUnanswered && !properties.to_itself &&
         !properties.on_gpu && !other_path;
}

const TransferPath& choose_path(const TransferProperties& properties) {
  if (properties.to_itself) return kCopyPath;
  // Transfers on GPUs run one at a time in each direction. Through slots, a sender would wait for
  // the receiver, and ranks could wait for each other in a circle.
  const bool can_be_direct = properties.shares_memory && !properties.on_gpu;
  if (!can_be_direct || properties.forced == kStreamPath.name) return kStreamPath;
  const bool pays = properties.bytes >= kLeastDirect || properties.forced == kDirectPath.name;
  return pays ? kDirectPath : kStreamPath;
}

std::size_t slot_chunk_bytes(std::size_t bytes) {
  const std::size_t part = (bytes / TransferSlots::kMostPerTransfer + 4095) / 4096 * 4096;
  return std::clamp(part, kLeastChunk, TransferSlots::kSlotBytes);
}

std::size_t slots_wanted(std::size_t bytes) {
  const std::size_t chunks = chunk_count(bytes, slot_chunk_bytes(bytes));
  return std::clamp(chunks, std::size_t{1}, TransferSlots::kMostPerTransfer);
}

}  // namespace horoplug
