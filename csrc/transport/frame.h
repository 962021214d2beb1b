// The frames of a link: a header of fixed size, and a payload.
#pragma once

#include <cstdint>
#include <tuple>

namespace horoplug {

// Identifies one collective on one process set. `check` is a hash of the batch's contents: ranks
// whose batches have the same number but different contents find out at the first frame.
struct Channel {
  // Epochs of sends and recvs, which no plan has. `batch` numbers the transfer then.
  static constexpr std::uint32_t kDownwards = 0xFFFFFFFE;  // to a lower rank
  static constexpr std::uint32_t kUpwards = 0xFFFFFFFF;

  std::uint32_t set = 0;
  std::uint32_t epoch = 0;  // of the plan that the batch belongs to; 0 if the batch was negotiated
  std::uint64_t batch = 0;
  std::uint64_t check = 0;

  auto key() const { return std::tuple(set, epoch, batch); }
};

// The fixed header of every frame, in wire format.
struct FrameHeader {
  static constexpr std::uint32_t kMagic = 0x31504F48;  // "HOP1"
  // kHold asks the peer to queue its data frames of a process set instead of sending them; kResume
  // asks it to send them again. Both have no payload.
  enum Kind : std::uint32_t { kControl = 1, kData = 2, kHold = 3, kResume = 4 };

  std::uint32_t magic = kMagic;
  std::uint32_t kind = kControl;
  std::uint32_t set = 0;
  std::uint32_t epoch = 0;
  std::uint64_t batch = 0;
  std::uint64_t check = 0;
  std::uint64_t bytes = 0;
};
static_assert(sizeof(FrameHeader) == 40);

// The data frames of a process set that are sent in the order in which they were queued: either
// those of its batches, or those of its sends and recvs (`transfers`), which are never held.
struct FrameSequence {
  std::uint32_t set = 0;
  bool transfers = false;
  bool operator==(const FrameSequence&) const = default;

  template <typename FrameOrChannel>
  static FrameSequence of(const FrameOrChannel& of) {
    return {of.set, of.epoch >= Channel::kDownwards};
  }
};

}  // namespace horoplug
