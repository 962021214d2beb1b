// Frames over a stream: control messages and the data of collectives share one ordered connection
// to a peer.
//
// A data frame belongs to a channel (process set, batch number) and matches the receives that were
// posted for that channel, in order. Payloads are sent without a copy, and received directly into
// the posted memory. A frame that arrives before its receive is posted waits on the heap. Control
// messages overtake queued data, so that an abort does not wait behind a gradient. Every header is
// validated before it is used.
//
// Flow control: a peer that has sent much data of a process set for which no receives are posted
// yet is asked to hold the set's further frames, and to resume when part of that data is taken or a
// receive finds no frame. It applies to each set separately, and other frames pass those that are
// held. docs/design/transports.md shows why this cannot cause a deadlock.
//
// One thread at a time uses a link. Its functions never block.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/status.h"
#include "base/task.h"
#include "base/wire.h"
#include "transport/stream.h"

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

// What the links of a mesh tell it, so that it need not look at idle links.
struct LinkActivity {
  std::vector<int> writers;  // indices of links that have something to write, each once
  std::uint64_t failures = 0;
  std::uint64_t control_messages = 0;
  std::uint64_t control_bytes = 0;
  std::uint64_t bytes_moved = 0;
};

class Link {
 public:
  // The limit for control messages and data frames. Collectives split their messages into chunks.
  static constexpr std::uint64_t kMaxControlBytes = 64 << 20;
  static constexpr std::uint64_t kMaxDataBytes = 64 << 20;

  // The largest limit for the backlog of a process set, in bytes: see set_backlog_limit().
  static constexpr std::uint64_t kMostBacklog = 16 << 20;

  using ControlHandler = std::function<void(int peer, Bytes message)>;

  class Receive;  // NOLINT(*-virtual-class-destructor): final, which a declaration cannot say

  Link(int peer, std::unique_ptr<Stream> stream, ControlHandler on_control);
  ~Link();
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  int peer() const { return peer_; }
  // From now on this link tells what happens on it, as the link of this index. Call it before
  // anything does.
  void report_to(LinkActivity& activity, int index) {
    activity_ = &activity;
    index_ = index;
  }
  // The mesh has removed this link from the writers.
  void unlist() { listed_ = false; }
  // The peer is asked to hold a process set whose backlog exceeds this.
  void set_backlog_limit(std::uint64_t bytes) { backlog_limit_ = bytes; }
  // The bytes of collectives of all sets that have arrived and wait for their receives.
  std::uint64_t backlog() const;
  int fd() const { return stream_->fd(); }
  // Whether a receive is posted or data is queued. A polled stream must be polled then.
  bool busy() const;
  // Releases the stream's resources. The link cannot be used afterwards.
  void close() { stream_->close(); }

  void send_control(Bytes message);

  // Queues a data frame and returns its ticket. `data` must stay valid and unchanged until
  // sent(channel, ticket).
  std::uint64_t send(const Channel& channel, const void* data, std::size_t bytes);
  bool sent(const Channel& channel, std::uint64_t ticket) const;

  // Transfer what can be transferred without blocking, and return whether anything was. They never
  // throw: a broken link stores the reason.
  bool pump_write();
  bool pump_read();
  bool control_has_left() const {
    const bool leaving = current_ && current_->header.kind == FrameHeader::kControl;
    return (control_queue_.empty() && !leaving) || failure_;
  }
  bool wants_write() const { return !queue_empty() && !failure_; }

  // Drops frames that were kept for a channel without further receives.
  void forget(const Channel& channel);
  // Withdraws the queued frames of a channel. Their memory, which must still be there, is not read
  // afterwards: a frame that is partly sent is completed from a copy.
  void take_back(const Channel& channel);
  // Ends the plan of an epoch: drops the frames of its batches from this one on, both those that
  // have arrived and those that the peer sent before it learned of the end.
  void end_epoch(std::uint32_t set, std::uint32_t epoch, std::uint64_t first_dropped);

  // Closes the sending direction once the queue is empty.
  void close_write();
  bool write_closed() const { return write_closed_; }

  // Set once the link cannot be used any more: broken, closed by the peer, or after an invalid
  // frame.
  const std::optional<std::string>& failure() const { return failure_; }
  void fail(const std::string& reason);
  // True if the peer closed the connection, rather than violated the protocol.
  bool closed_by_peer() const { return ended_; }

  // The process set and the epoch whose frames carry data. Control messages have none.
  using Flow = std::pair<std::uint32_t, std::uint32_t>;
  // Adds the flows of which this link has moved data since the last call. Returns whether there
  // are any.
  bool take_flows(std::set<Flow>& flows);

 private:
  struct Outgoing {
    FrameHeader header;
    Bytes owned;                      // payload of a control message
    const std::byte* data = nullptr;  // payload of a data frame
    std::uint64_t ticket = 0;         // of a data frame
  };
  // The data frames of a process set that are sent in the order in which they were queued: either
  // those of its batches, or those of its sends and recvs (`transfers`), which are never held.
  struct Sequence {
    std::uint32_t set = 0;
    bool transfers = false;
    bool operator==(const Sequence&) const = default;
  };
  template <typename FrameOrChannel>
  static Sequence sequence_of(const FrameOrChannel& of) {
    return {of.set, of.epoch >= Channel::kDownwards};
  }
  // A sequence with frames that are neither sent nor withdrawn.
  struct Unsent {
    Sequence sequence;
    std::uint64_t frames = 0;
    std::uint64_t last_sent = 0;  // a ticket
  };
  // The data of a process set that has arrived and waits for its receives.
  struct Backlog {
    std::uint32_t set = 0;
    bool held = false;  // the peer was asked to hold
    std::uint64_t bytes = 0;
  };
  // A frame that arrived before its receive was posted.
  struct Early {
    std::unique_ptr<std::byte[]> data;
    std::uint64_t bytes = 0;
    bool complete = false;
    Receive* wanted_by = nullptr;  // a receive that was posted while the frame was still arriving
  };
  struct Inbox {
    std::deque<Receive*> posted;
    std::deque<Early> early;
    std::uint64_t check = 0;
  };
  using InboxKey = std::tuple<std::uint32_t, std::uint32_t, std::uint64_t>;

  void list_as_writer();
  bool queue_empty() const { return !current_ && control_queue_.empty() && data_queue_.empty(); }
  bool take_next_frame();
  void left(const Outgoing& frame, bool was_sent);
  void send_notice(FrameHeader::Kind kind, std::uint32_t set);
  void hold(std::uint32_t set);
  void resume(std::uint32_t set);
  void add_to_backlog(const FrameHeader& header);
  void remove_from_backlog(const Sequence& sequence, std::uint64_t bytes);
  void let_peer_resume(Backlog& backlog);
  bool has_posted_receives(std::uint32_t set) const;
  bool holds_frames() const;
  void abandon_sending();
  void post(Receive* receive);
  void withdraw(Receive* receive);
  void consume(const std::byte* data, std::size_t bytes);
  void begin_frame();
  void end_frame();
  void check_header(const FrameHeader& header) const;
  bool is_dropped(const FrameHeader& header) const;
  void note_data(const FrameHeader& header);
  void forget(std::map<InboxKey, Inbox>::iterator inbox);

  const int peer_;
  std::unique_ptr<Stream> stream_;
  ControlHandler on_control_;
  std::optional<std::string> failure_;
  bool ended_ = false;

  // Outgoing: the current frame, and the queues behind it.
  std::optional<Outgoing> current_;
  std::size_t current_done_ = 0;  // bytes of its header and payload that are sent
  std::deque<Outgoing> control_queue_;
  std::deque<Outgoing> data_queue_;
  std::map<std::uint32_t, std::deque<Outgoing>> held_;  // by set: the frames that are held
  std::vector<Unsent> unsent_;
  std::uint64_t tickets_ = 0;
  bool close_when_empty_ = false;
  bool write_closed_ = false;

  // Incoming: the header, then the payload into target_.
  std::map<InboxKey, Inbox> inboxes_;
  std::vector<Backlog> backlogs_;  // those that are not empty, or held
  std::uint64_t backlog_limit_ = kMostBacklog;
  FrameHeader header_;
  std::size_t header_have_ = 0;
  bool in_payload_ = false;
  std::byte* target_ = nullptr;
  std::uint64_t payload_left_ = 0;
  Receive* receiving_ = nullptr;  // the posted receive that the frame belongs to
  Inbox* early_inbox_ = nullptr;  // or the inbox whose last early frame it is
  bool discard_ = false;          // or none: the receive was withdrawn
  Bytes control_in_;
  // By process set: the plans that ended last, by epoch, with the first batch that did not run.
  // Frames of earlier plans are all dropped: so many plans end only while their last batches are
  // done.
  static constexpr std::size_t kMostEndedPlans = 16;
  std::map<std::uint32_t, std::map<std::uint32_t, std::uint64_t>> ended_plans_;

  LinkActivity own_activity_;  // of a link without a mesh
  LinkActivity* activity_ = &own_activity_;
  int index_ = 0;
  bool listed_ = false;            // among the writers
  std::set<Flow> flows_;           // since the last look
  std::optional<Flow> last_flow_;  // the last one that was added
};

// A receive that is posted by the constructor and withdrawn by the destructor.
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
