// The frames that a link is to send: the current one, and the queues behind it.
//
// Control frames overtake data frames, but not the rest of a frame that has begun to leave. The
// data frames of a process set that the peer asks to hold are queued apart until it asks to resume
// them.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <vector>

#include "base/wire.h"
#include "transport/frame.h"

namespace horoplug {

class FrameQueue {
 public:
  // ---- queueing; after close(), frames are not queued

  void add_control(Bytes message);
  void add_notice(FrameHeader::Kind kind, std::uint32_t set);
  // Queues a data frame and returns its ticket. `data` must stay valid and unchanged until
  // sent(channel, ticket).
  std::uint64_t add_data(const Channel& channel, const void* data, std::size_t bytes);
  bool sent(const Channel& channel, std::uint64_t ticket) const;
  void close() { closed_ = true; }
  bool closed() const { return closed_; }

  // ---- what the peer or the program wants

  // The peer asks to hold the batches of a process set, or to resume them. Throw WireError if it is
  // out of turn.
  void hold(std::uint32_t set);
  void resume(std::uint32_t set);
  // Withdraws the frames of a channel. Their memory, which must still be there, is not read
  // afterwards: a frame that is partly sent is completed from a copy.
  void take_back(const Channel& channel);
  // Nothing can be sent any more.
  void abandon();

  // ---- sending

  // Whether nothing can be sent now. Frames that are held do not count.
  bool empty() const { return !current_ && control_.empty() && data_.empty(); }
  bool holds_frames() const;
  // Whether all control messages have left.
  bool control_has_left() const {
    const bool leaving = current_ && current_->header.kind == FrameHeader::kControl;
    return control_.empty() && !leaving;
  }
  // The rest of the current frame, which is the next one if there was none. Returns the number of
  // parts; 0: the queue is empty.
  int rest(iovec (&parts)[2]);
  // The header of the current frame. rest() has returned it.
  const FrameHeader& current() const { return current_->header; }
  // So many bytes of the current frame have left.
  void advance(std::size_t bytes) {
    done_ += bytes;
    if (done_ < sizeof(FrameHeader) + current_->header.bytes) return;
    if (current_->header.kind == FrameHeader::kData) left(*current_, true);
    current_.reset();
  }

 private:
  // Limit for the process sets that a peer can ask to hold; each takes memory here.
  static constexpr std::size_t kMostHeld = 4096;

  struct Outgoing {
    FrameHeader header;
    Bytes owned;                      // payload of a control message
    const std::byte* data = nullptr;  // payload of a data frame
    std::uint64_t ticket = 0;         // of a data frame
  };
  // A sequence with frames that are neither sent nor withdrawn.
  struct Unsent {
    FrameSequence sequence;
    std::uint64_t frames = 0;
    std::uint64_t last_sent = 0;  // a ticket
  };

  bool begin_next();
  void left(const Outgoing& frame, bool was_sent);

  std::optional<Outgoing> current_;
  std::size_t done_ = 0;  // bytes of its header and payload that are sent
  std::deque<Outgoing> control_;
  std::deque<Outgoing> data_;
  std::map<std::uint32_t, std::deque<Outgoing>> held_;  // by set: the frames that are held
  std::vector<Unsent> unsent_;
  std::uint64_t tickets_ = 0;
  bool closed_ = false;
};

}  // namespace horoplug
