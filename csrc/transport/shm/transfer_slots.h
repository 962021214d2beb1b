// The memory through which the ranks of one host send each other single tensors.
//
// Each rank has a pool of slots in its segment, behind the memory of the set of all ranks. For each
// tensor that it receives, it lends some of them to the sender (SlotPool, SlotLoan). Chunk i of the
// tensor passes through slot i mod n of the n that are lent:
//     filled  = t   the sender has written the slot t times in this loan
//     emptied = t   the receiver has read it t times
// The sender writes a slot only while filled == emptied, and the receiver reads it only while
// filled > emptied. So chunks are written and read at the same time as long as n > 1. The loan ends
// when the receiver has read everything: the sender has written its last chunk before that.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/cache_line.h"
#include "base/task.h"
#include "transport/doorbell.h"
#include "transport/shm/arena.h"
#include "transport/shm/segment.h"

namespace horoplug {

class TransferSlots {
 public:
  // A slot stays in the cache of the core that reads it next. Memory that no transfer has used yet
  // is not allocated.
  static constexpr std::size_t kSlotBytes = 128 << 10;
  static constexpr std::uint32_t kSlots = 16;
  // A single transfer does not become faster with more.
  static constexpr std::size_t kMostPerTransfer = 4;

  using Counter = std::atomic<std::uint64_t>;
  static_assert(Counter::is_always_lock_free);
  struct Flags {
    alignas(kCacheLine) Counter filled{0};
    alignas(kCacheLine) Counter emptied{0};
  };
  // The place of the pool in the segment of a rank.
  static constexpr std::size_t kBegin = Arena::kSegmentBytes;
  static constexpr std::size_t kFlagBytes = 4096;
  static_assert(kSlots * sizeof(Flags) <= kFlagBytes);
  static constexpr std::size_t kEnd = kBegin + kFlagBytes + kSlots * kSlotBytes;

  explicit TransferSlots(Segment segment) : segment_(std::move(segment)) {}

  Flags& flags(std::uint32_t slot) const {
    return reinterpret_cast<Flags*>(segment_.data() + kBegin)[slot];
  }
  std::byte* data(std::uint32_t slot) const {
    return segment_.data() + kBegin + kFlagBytes + slot * kSlotBytes;
  }

 private:
  Segment segment_;
};

// Which slots of this rank are lent.
class SlotPool {
 public:
  SlotPool();
  // At most `wanted` slots; none if all are lent.
  std::vector<std::uint32_t> take(std::size_t wanted);
  void give_back(std::span<const std::uint32_t> slots);
  std::size_t available() const { return free_.size(); }

 private:
  std::vector<std::uint32_t> free_;  // the slots that were used last are at the end
};

// One side of a transfer through slots that the receiver has lent to the sender.
class SlotLoan {
 public:
  // `slots`: of the receiver's pool, 1 or more. `peer`: the rank at the other end.
  SlotLoan(TransferSlots pool, std::vector<std::uint32_t> slots, int peer,
           std::shared_ptr<Doorbell> doorbell_of_peer);

  // The receiver, before the sender knows of the loan.
  void begin();
  const std::vector<std::uint32_t>& slots() const { return slots_; }

  std::byte* data(std::size_t chunk) const { return pool_.data(slot_of(chunk)); }
  // The sender has written a chunk, or the receiver has read it; wakes the other one.
  void fill(std::size_t chunk) { publish(flags_of(chunk).filled, chunk); }
  void empty(std::size_t chunk) { publish(flags_of(chunk).emptied, chunk); }

  // Waits until the sender may write a chunk, or until the receiver may read it.
  class Turn final : public Waitable {
   public:
    Turn(const TransferSlots::Counter& counter, std::uint64_t wanted, int peer)
        : counter_(counter), wanted_(wanted), peer_(peer) {}
    bool ready() override { return counter_.load(std::memory_order_acquire) >= wanted_; }
    void blame(std::vector<int>& ranks) const override { ranks.push_back(peer_); }

   private:
    const TransferSlots::Counter& counter_;
    const std::uint64_t wanted_;
    const int peer_;
  };
  Turn writable(std::size_t chunk) const {
    return {flags_of(chunk).emptied, turn_of(chunk) - 1, peer_};
  }
  Turn readable(std::size_t chunk) const { return {flags_of(chunk).filled, turn_of(chunk), peer_}; }

 private:
  std::uint32_t slot_of(std::size_t chunk) const { return slots_[chunk % slots_.size()]; }
  std::uint64_t turn_of(std::size_t chunk) const { return chunk / slots_.size() + 1; }
  TransferSlots::Flags& flags_of(std::size_t chunk) const { return pool_.flags(slot_of(chunk)); }
  void publish(TransferSlots::Counter& counter, std::size_t chunk);

  const TransferSlots pool_;
  const std::vector<std::uint32_t> slots_;
  const int peer_;
  const std::shared_ptr<Doorbell> doorbell_of_peer_;
};

}  // namespace horoplug
