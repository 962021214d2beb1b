// The frames of a link: a header of fixed size, and a payload.
#pragma once

#include <cstdint>
#include <tuple>

namespace horoplug {

// Identifies one collective on one process set. `check` is a hash of the batch's contents: ranks
// whose batches have the same number but different contents find out at the first frame.
struct Channel {
  // What is numbered: batches, or the sends and recvs of one direction between two ranks.
  enum class Traffic : std::uint16_t {
    kBatches,
    kUpwards,    // sends to a higher rank
    kDownwards,  // sends to a lower rank
  };

  std::uint32_t set = 0;
  std::uint32_t epoch = 0;  // of the plan that the batch belongs to; 0: it was negotiated
  std::uint64_t batch = 0;  // or the number of the send
  std::uint64_t check = 0;
  Traffic traffic = Traffic::kBatches;

  using Key = std::tuple<std::uint32_t, Traffic, std::uint32_t, std::uint64_t>;
  Key key() const { return {set, traffic, epoch, batch}; }
};

// The fixed header of every frame, in wire format.
struct FrameHeader {
  static constexpr std::uint32_t kMagic = 0x31504F48;  // "HOP1"
  // kHold asks the peer to queue its data frames of a process set instead of sending them; kResume
  // asks it to send them again. Both have no payload.
  enum Kind : std::uint16_t { kControl = 1, kData = 2, kHold = 3, kResume = 4 };

  std::uint32_t magic = kMagic;
  std::uint16_t kind = kControl;
  Channel::Traffic traffic = Channel::Traffic::kBatches;  // of kData
  std::uint32_t set = 0;
  std::uint32_t epoch = 0;
  std::uint64_t batch = 0;
  std::uint64_t check = 0;
  std::uint64_t bytes = 0;

  Channel channel() const { return {set, epoch, batch, check, traffic}; }
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
    return {of.set, of.traffic != Channel::Traffic::kBatches};
  }
};

}  // namespace horoplug
