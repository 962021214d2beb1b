#include "transport/shm/transfer_slots.h"

#include <algorithm>
#include <utility>

namespace horoplug {

SlotPool::SlotPool() {
  for (std::uint32_t slot = TransferSlots::kSlots; slot > 0; --slot) free_.push_back(slot - 1);
}

std::vector<std::uint32_t> SlotPool::take(std::size_t wanted) {
  const auto count = static_cast<std::ptrdiff_t>(std::min(wanted, free_.size()));
  const std::vector<std::uint32_t> taken(free_.end() - count, free_.end());
  free_.erase(free_.end() - count, free_.end());
  return taken;
}

void SlotPool::give_back(std::span<const std::uint32_t> slots) {
  free_.insert(free_.end(), slots.begin(), slots.end());
}

SlotLoan::SlotLoan(TransferSlots pool, std::vector<std::uint32_t> slots, int peer,
                   std::shared_ptr<Doorbell> doorbell_of_peer)
    : pool_(std::move(pool)),
      slots_(std::move(slots)),
      peer_(peer),
      doorbell_of_peer_(std::move(doorbell_of_peer)) {}

void SlotLoan::begin() {
  for (const std::uint32_t slot : slots_) {
    pool_.flags(slot).filled.store(0, std::memory_order_relaxed);
    pool_.flags(slot).emptied.store(0, std::memory_order_relaxed);
  }
}

void SlotLoan::publish(TransferSlots::Counter& counter, std::size_t chunk) {
  counter.store(turn_of(chunk), std::memory_order_release);
  full_fence();
  doorbell_of_peer_->ring_unless_resting();
}

}  // namespace horoplug
