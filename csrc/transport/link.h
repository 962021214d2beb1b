// Frames over a stream: control messages and the data of collectives share one ordered connection
// to a peer.
//
// A data frame belongs to a channel, (process set, batch number), and matches the receives posted
// there in order. Payloads are not copied on the way out, and go straight into the posted memory on
// the way in; a frame that comes before its receive is kept on the heap until then. Control
// messages overtake data that is still queued, so that an abort does not wait behind a gradient.
// Everything that arrives is checked before it is believed.
//
// A link is driven by one thread and does not block.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "base/status.h"
#include "base/task.h"
#include "base/wire.h"
#include "transport/stream.h"

namespace horoplug {

// Names one collective on one process set. `check` is a hash of what the batch contains: ranks
// whose batches of the same number differ find out at the first frame.
struct Channel {
  std::uint32_t set = 0;
  std::uint32_t epoch = 0;  // of the plan that the batch belongs to; 0: it was negotiated
  std::uint64_t batch = 0;
  std::uint64_t check = 0;

  auto key() const { return std::tuple(set, epoch, batch); }
};

// The fixed header of every frame, as it travels.
struct FrameHeader {
  static constexpr std::uint32_t kMagic = 0x31504F48;  // "HOP1"
  enum Kind : std::uint32_t { kControl = 1, kData = 2 };

  std::uint32_t magic = kMagic;
  std::uint32_t kind = kControl;
  std::uint32_t set = 0;
  std::uint32_t epoch = 0;
  std::uint64_t batch = 0;
  std::uint64_t check = 0;
  std::uint64_t bytes = 0;
};
static_assert(sizeof(FrameHeader) == 40);

class Link {
 public:
  // No control message is larger, and no data frame is (collectives cut their messages into
  // chunks).
  static constexpr std::uint64_t kMaxControlBytes = 64 << 20;
  static constexpr std::uint64_t kMaxDataBytes = 64 << 20;

  using ControlHandler = std::function<void(int peer, Bytes message)>;

  class Receive;

  Link(int peer, std::unique_ptr<Stream> stream, ControlHandler on_control);
  ~Link();
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  int peer() const { return peer_; }
  int fd() const { return stream_->fd(); }
  // Whether somebody waits for what comes in, or something is still to leave: a stream that is
  // polled is to be looked at then.
  bool busy() const;
  // Its stream is of no more use; what it holds is let go of.
  void close() { stream_->close(); }

  void send_control(Bytes message);

  // Queues a data frame; `data` must stay as it is until sent(ticket). Returns the ticket.
  std::uint64_t send(const Channel& channel, const void* data, std::size_t bytes);
  bool sent(std::uint64_t ticket) const { return frames_sent_ >= ticket || failure_.has_value(); }

  // Move what can be moved now. True if anything was. They never throw: a broken link remembers
  // why.
  bool pump_write();
  bool pump_read();
  bool control_has_left() const {
    const bool leaving = current_ && current_->header.kind == FrameHeader::kControl;
    return (control_queue_.empty() && !leaving) || failure_;
  }
  bool wants_write() const { return !queue_empty() && !failure_; }

  // Frames kept for a channel that will receive no more are dropped.
  void forget(const Channel& channel);
  // What was queued for a channel is taken back: nothing reads the memory of those frames any more.
  // A frame that has begun to leave is finished, from a copy.
  void take_back(const Channel& channel);
  // The plan of an epoch has ended: frames of its batches from this one on are dropped, those that
  // are here and those that the peer sent before it heard of it.
  void end_epoch(std::uint32_t set, std::uint32_t epoch, std::uint64_t first_dropped);

  // Says that nothing more will be sent once the queue is empty.
  void close_write();
  bool write_closed() const { return write_closed_; }

  // Set once the link is of no more use: broken, closed by the peer, or fed nonsense.
  const std::optional<std::string>& failure() const { return failure_; }
  void fail(const std::string& reason);
  // True if the failure was the peer's closing the connection, as opposed to breaking a rule.
  bool closed_by_peer() const { return ended_; }

  std::uint64_t control_messages() const { return control_messages_; }
  std::uint64_t control_bytes() const { return control_bytes_; }
  std::uint64_t bytes_moved() const { return bytes_moved_; }
  // Of these, what collectives have sent and received.
  std::uint64_t data_moved() const { return data_moved_; }

 private:
  struct Outgoing {
    FrameHeader header;
    Bytes owned;                      // a control message
    const std::byte* data = nullptr;  // of a data frame; nullptr: it was taken back
  };
  // A frame that came before its receive.
  struct Early {
    std::unique_ptr<std::byte[]> data;
    std::uint64_t bytes = 0;
    bool complete = false;
    Receive* wanted_by = nullptr;  // a receive that was posted while the frame was still coming in
  };
  struct Inbox {
    std::deque<Receive*> posted;
    std::deque<Early> early;
    std::uint64_t check = 0;
  };
  using InboxKey = std::tuple<std::uint32_t, std::uint32_t, std::uint64_t>;

  bool queue_empty() const { return !current_ && control_queue_.empty() && data_queue_.empty(); }
  bool take_next_frame();
  void post(Receive* receive);
  void withdraw(Receive* receive);
  void consume(const std::byte* data, std::size_t bytes);
  void begin_frame();
  void end_frame();
  void check_header(const FrameHeader& header) const;
  bool is_dropped(const FrameHeader& header) const;
  void forget(std::map<InboxKey, Inbox>::iterator inbox);

  const int peer_;
  std::unique_ptr<Stream> stream_;
  ControlHandler on_control_;
  std::optional<std::string> failure_;
  bool ended_ = false;

  // Outgoing: the frame on its way, and what waits.
  std::optional<Outgoing> current_;
  std::size_t current_done_ = 0;  // header and payload bytes of it that are gone
  std::deque<Outgoing> control_queue_;
  std::deque<Outgoing> data_queue_;
  std::uint64_t frames_queued_ = 0;
  std::uint64_t frames_sent_ = 0;
  bool close_when_empty_ = false;
  bool write_closed_ = false;

  // Incoming: header, then payload into target_.
  std::map<InboxKey, Inbox> inboxes_;
  std::array<std::byte, 16 * 1024> staging_;
  FrameHeader header_;
  std::size_t header_have_ = 0;
  bool in_payload_ = false;
  std::byte* target_ = nullptr;
  std::uint64_t payload_left_ = 0;
  Receive* receiving_ = nullptr;  // posted receive that the frame goes to
  Inbox* early_inbox_ = nullptr;  // or the inbox whose last early frame it is
  bool discard_ = false;          // or nobody: its receive was withdrawn
  Bytes control_in_;
  // By set and epoch: the first batch that did not run.
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::uint64_t> dropped_from_;

  std::uint64_t control_messages_ = 0;
  std::uint64_t control_bytes_ = 0;
  std::uint64_t bytes_moved_ = 0;
  std::uint64_t data_moved_ = 0;
};

// A receive that is posted from construction on and withdrawn on destruction.
class Link::Receive final : public Waitable {
 public:
  Receive(Link& link, const Channel& channel, void* data, std::size_t bytes);
  ~Receive();
  Receive(const Receive&) = delete;
  Receive& operator=(const Receive&) = delete;

  bool ready() override { return done_ || link_.failure().has_value(); }
  void finish() override;
  void blame(std::vector<int>& ranks) const override { ranks.push_back(link_.peer()); }

 private:
  friend class Link;
  Link& link_;
  const Channel channel_;
  std::byte* const data_;
  const std::size_t bytes_;
  bool done_ = false;
};

}  // namespace horoplug
