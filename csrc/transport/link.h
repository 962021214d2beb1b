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
// FrameQueue has what is to be sent, ReceiveMatcher what has arrived and the receives that wait for
// it. The link moves bytes between them and its stream, and ends when one of the three fails.
//
// One thread at a time uses a link. Its functions never block.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
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
#include "transport/frame.h"
#include "transport/frame_queue.h"
#include "transport/receive_matcher.h"
#include "transport/shm/mailbox_stream.h"
#include "transport/stream.h"

namespace horoplug {

// What the links of a mesh tell it, so that it need not look at idle links.
struct LinkActivity {
  std::vector<int> writers;  // indices of links that have something to write, each once
  std::vector<int> needed;   // ranks to which an absent link has something to write
  std::size_t receives = 0;  // that are posted, on links without a mailbox
  std::uint64_t failures = 0;
  std::uint64_t control_messages = 0;
  std::uint64_t control_bytes = 0;
  std::uint64_t bytes_moved = 0;
  std::uint64_t socket_bytes = 0;  // of them, those over streams that a descriptor announces
};

class Link {
 public:
  // The limit for control messages and data frames. Collectives split their messages into chunks.
  static constexpr std::uint64_t kMaxControlBytes = 64 << 20;
  static constexpr std::uint64_t kMaxDataBytes = 64 << 20;

  // The largest limit for the backlog of a process set, in bytes: see set_backlog_limit().
  static constexpr std::uint64_t kMostBacklog = ReceiveMatcher::kMostBacklog;

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
  void set_backlog_limit(std::uint64_t bytes) { matcher_.set_backlog_limit(bytes); }
  // The bytes of collectives of all sets that have arrived and wait for their receives.
  std::uint64_t backlog() const { return matcher_.backlog(); }
  const Stream::Traits& traits() const { return traits_; }
  // Whether the link is not connected yet. What is sent over it waits until it is.
  bool absent() const { return traits_.wake_up == Stream::WakeUp::kAbsent; }
  // Connects an absent link.
  void connect(std::unique_ptr<Stream> stream);
  // Whether the link has been connected from the beginning, which is the same at both ends.
  bool connected_from_start() const { return connected_from_start_; }
  // The ranks' mailboxes carry what the stream has carried, as soon as the frames that are queued
  // now have been written and the peer reads its mailbox.
  void use_mailboxes(RingEnd out, RingEnd in, std::shared_ptr<Doorbell> peer);
  // The stream since then; nullptr before.
  MailboxStream* mailbox() const { return mailbox_; }
  // epoll has reported the stream's descriptor.
  void note_event() { stream_->note_event(); }
  // Whether a receive is posted or data is queued. A polled stream must be polled then.
  bool busy() const;
  // Releases the stream's resources. The link cannot be used afterwards.
  void close() { stream_->close(); }

  void send_control(Bytes message);

  // Queues a data frame and returns its ticket. `data` must stay valid and unchanged until
  // sent(channel, ticket).
  std::uint64_t send(const Channel& channel, const void* data, std::size_t bytes);
  bool sent(const Channel& channel, std::uint64_t ticket) const {
    return failure_ || queue_.sent(channel, ticket);
  }

  // Transfer what can be transferred without blocking, and return whether anything was. They never
  // throw: a broken link stores the reason.
  bool pump_write();
  bool pump_read();
  bool control_has_left() const { return failure_ || queue_.control_has_left(); }
  bool wants_write() const { return !queue_.empty() && !failure_ && !absent(); }

  // From now on, what arrives is dropped, whatever it is.
  void drop_input() { drops_input_ = true; }

  // Drops frames that were kept for a channel without further receives.
  void forget(const Channel& channel);
  // Withdraws the queued frames of a channel. Their memory, which must still be there, is not read
  // afterwards: a frame that is partly sent is completed from a copy.
  void take_back(const Channel& channel) { queue_.take_back(channel); }
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

  // The process set, the traffic and the epoch whose frames carry data. Control messages have none.
  using Flow = std::tuple<std::uint32_t, Channel::Traffic, std::uint32_t>;
  template <typename FrameOrChannel>
  static Flow flow_of(const FrameOrChannel& of) {
    return {of.set, of.traffic, of.epoch};
  }
  // Adds the flows of which this link has moved data since the last call. Returns whether there
  // are any.
  bool take_flows(std::set<Flow>& flows);

 private:
  void list_as_writer();
  void note_bytes(std::uint64_t bytes);
  void send_notices();
  void post(PostedReceive& receive);
  void withdraw(PostedReceive& receive);
  void consume(const std::byte* data, std::size_t bytes);
  void begin_frame();
  void end_frame();
  void drop_target();
  void note_data(const FrameHeader& header);

  const int peer_;
  std::unique_ptr<Stream> stream_;
  Stream::Traits traits_;
  ControlHandler on_control_;
  std::optional<std::string> failure_;
  bool ended_ = false;
  const bool connected_from_start_;
  MailboxStream* mailbox_ = nullptr;
  std::uint64_t sent_ = 0, received_ = 0;  // bytes over the stream

  FrameQueue queue_;
  bool close_when_empty_ = false;
  bool write_closed_ = false;

  // Incoming: the header, then the payload into target_.
  ReceiveMatcher matcher_;
  FrameHeader header_;
  std::size_t header_have_ = 0;
  bool in_payload_ = false;
  std::byte* target_ = nullptr;  // nullptr: the payload is dropped
  std::uint64_t payload_left_ = 0;
  Bytes control_in_;
  bool drops_input_ = false;

  LinkActivity own_activity_;  // of a link without a mesh
  LinkActivity* activity_ = &own_activity_;
  int index_ = 0;
  bool listed_ = false;            // among the writers, or its rank among those needed
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

  bool ready() override { return posted_.done || link_.failure().has_value(); }
  void finish() override;
  void blame(std::vector<int>& ranks) const override { ranks.push_back(link_.peer()); }

 private:
  Link& link_;
  PostedReceive posted_;
};

}  // namespace horoplug
