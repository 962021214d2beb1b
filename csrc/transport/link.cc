#include "transport/link.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <system_error>

namespace horoplug {
namespace {

// Limit for reads per pump: a fast peer must not keep this thread from its other links.
constexpr int kReadsPerPump = 4;
// Payloads of at least this size are read directly into their destination. Smaller ones share one
// read with their header.
constexpr std::uint64_t kDirectRead = 4096;
constexpr std::size_t kStagingBytes = 16 * 1024;
// Limit for the bytes written per pump: while a peer reads fast, this thread must still read the
// peer's kHold.
constexpr std::uint64_t kBytesPerPump = 4 << 20;

void check_header(const FrameHeader& header) {
  if (header.magic != FrameHeader::kMagic) throw WireError("invalid frame header");
  if (header.kind == FrameHeader::kControl) {
    if (header.bytes > Link::kMaxControlBytes) throw WireError("control message too large");
  } else if (header.kind == FrameHeader::kData) {
    if (header.bytes > Link::kMaxDataBytes) throw WireError("data frame too large");
  } else if (header.kind == FrameHeader::kHold || header.kind == FrameHeader::kResume) {
    if (header.bytes > 0) throw WireError("kHold or kResume with a payload");
  } else {
    throw WireError("unknown frame kind");
  }
  const bool numbers_sends = header.traffic != Channel::Traffic::kBatches;
  if (header.traffic > Channel::Traffic::kDownwards ||
      (numbers_sends && (header.kind != FrameHeader::kData || header.epoch != 0))) {
    throw WireError("invalid traffic in a frame header");
  }
}

}  // namespace

Link::Link(int peer, std::unique_ptr<Stream> stream, ControlHandler on_control)
    : peer_(peer),
      stream_(std::move(stream)),
      traits_(stream_->traits()),
      on_control_(std::move(on_control)),
      connected_from_start_(!absent()) {}

Link::~Link() = default;

void Link::list_as_writer() {
  if (std::exchange(listed_, true)) return;
  if (absent()) {
    activity_->needed.push_back(peer_);
  } else {
    activity_->writers.push_back(index_);
  }
}

void Link::connect(std::unique_ptr<Stream> stream) {
  stream_ = std::move(stream);
  traits_ = stream_->traits();
  listed_ = false;
  if (!queue_.empty()) list_as_writer();
}

void Link::use_mailboxes(RingEnd out, RingEnd in, std::shared_ptr<Doorbell> peer) {
  auto stream = std::make_unique<MailboxStream>(std::move(stream_), std::move(out), std::move(in),
                                                std::move(peer), received_);
  mailbox_ = stream.get();
  stream_ = std::move(stream);
  traits_ = stream_->traits();
  pump_write();
}

void Link::note_bytes(std::uint64_t bytes) {
  activity_->bytes_moved += bytes;
  if (traits_.wake_up == Stream::WakeUp::kDescriptor) activity_->socket_bytes += bytes;
}

// ---- sending ----

void Link::send_control(Bytes message) {
  if (queue_.closed()) return;
  ++activity_->control_messages;
  activity_->control_bytes += message.size();
  queue_.add_control(std::move(message));
  list_as_writer();
}

std::uint64_t Link::send(const Channel& channel, const void* data, std::size_t bytes) {
  const std::uint64_t ticket = queue_.add_data(channel, data, bytes);
  if (!queue_.closed()) list_as_writer();
  return ticket;
}

// What the matcher wants the peer to know.
void Link::send_notices() {
  if (!matcher_.has_notices()) return;
  for (const auto& [kind, set] : matcher_.take_notices()) queue_.add_notice(kind, set);
  if (!queue_.closed()) list_as_writer();
}

bool Link::pump_write() {
  bool moved = false;
  std::uint64_t written = 0;
  iovec parts[2];
  while (!failure_ && written < kBytesPerPump) {
    const int count = queue_.rest(parts);
    if (count == 0) break;
    try {
      const std::size_t taken = stream_->write(parts, count);
      if (taken == 0) break;
      moved = true;
      written += taken;
      sent_ += taken;
      note_bytes(taken);
      note_data(queue_.current());
      queue_.advance(taken);
    } catch (const std::system_error&) {
      // Data that the peer sent before it closed is still to be read and gives the reason. The
      // receiving side reports the end.
      queue_.abandon();
      queue_.close();
      close_when_empty_ = true;
      break;
    }
  }
  const bool can_change_over = mailbox_ != nullptr && !mailbox_->writes() && queue_.empty();
  if (can_change_over && mailbox_->peer_reads()) mailbox_->begin_writing(sent_);
  if (close_when_empty_ && queue_.empty() && !write_closed_) {
    write_closed_ = true;
    stream_->close_write();
  }
  return moved;
}

void Link::close_write() {
  queue_.close();
  close_when_empty_ = true;
  pump_write();
}

// Consecutive frames of one flow need no look-up.
void Link::note_data(const FrameHeader& header) {
  if (header.kind != FrameHeader::kData) return;
  const Flow flow = flow_of(header);
  if (last_flow_ == flow) return;
  flows_.insert(flow);
  last_flow_ = flow;
}

bool Link::take_flows(std::set<Flow>& flows) {
  if (flows_.empty()) return false;
  flows.merge(flows_);
  flows_.clear();
  last_flow_.reset();
  return true;
}

// ---- receiving ----

bool Link::pump_read() {
  bool moved = false;
  // On the stack: as a member, it would take memory in each of thousands of idle links.
  std::array<std::byte, kStagingBytes> staging;
  for (int i = 0; (i < kReadsPerPump || stream_->has_more()) && !failure_; ++i) {
    try {
      const bool direct =
          in_payload_ && target_ != nullptr && payload_left_ >= kDirectRead && !drops_input_;
      const std::ptrdiff_t got = direct ? stream_->read(target_, payload_left_)
                                        : stream_->read(staging.data(), staging.size());
      if (got == 0) break;
      if (got == Stream::kEnd) {
        ended_ = true;
        fail("the connection was closed");
        break;
      }
      moved = true;
      received_ += static_cast<std::uint64_t>(got);
      note_bytes(static_cast<std::uint64_t>(got));
      if (drops_input_) continue;
      if (direct) {
        target_ += got;
        payload_left_ -= static_cast<std::uint64_t>(got);
        note_data(header_);
        if (payload_left_ == 0) end_frame();
      } else {
        consume(staging.data(), static_cast<std::size_t>(got));
      }
    } catch (const std::system_error& error) {
      ended_ = true;
      fail(std::string("the connection broke: ") + error.code().message());
    } catch (const TamperedError& error) {
      fail(error.what());
      stream_->close_write();  // the peer must not wait for its timeout
    } catch (const WireError& error) {
      fail(std::string("it sent a malformed message: ") + error.what());
    }
  }
  return moved;
}

void Link::consume(const std::byte* data, std::size_t bytes) {
  while (bytes > 0 && !failure_) {
    if (!in_payload_) {
      const std::size_t part = std::min(bytes, sizeof header_ - header_have_);
      std::memcpy(reinterpret_cast<std::byte*>(&header_) + header_have_, data, part);
      header_have_ += part;
      data += part;
      bytes -= part;
      if (header_have_ == sizeof header_) {
        note_data(header_);
        begin_frame();
      }
    } else {
      const std::size_t part = std::min<std::uint64_t>(bytes, payload_left_);
      if (target_ != nullptr) {
        std::memcpy(target_, data, part);
        target_ += part;
      }
      payload_left_ -= part;
      note_data(header_);
      data += part;
      bytes -= part;
      if (payload_left_ == 0) end_frame();
    }
  }
}

void Link::begin_frame() {
  header_have_ = 0;
  check_header(header_);
  in_payload_ = true;
  payload_left_ = header_.bytes;
  target_ = nullptr;
  if (header_.kind == FrameHeader::kControl) {
    control_in_.resize(header_.bytes);
    target_ = control_in_.data();
  } else if (header_.kind == FrameHeader::kData) {
    target_ = matcher_.begin(header_);
    send_notices();
  }
  if (payload_left_ == 0) end_frame();
}

void Link::end_frame() {
  in_payload_ = false;
  if (header_.kind == FrameHeader::kControl) {
    Bytes message = std::move(control_in_);
    control_in_.clear();
    on_control_(peer_, std::move(message));
  } else if (header_.kind == FrameHeader::kHold) {
    queue_.hold(header_.set);
  } else if (header_.kind == FrameHeader::kResume) {
    queue_.resume(header_.set);
    list_as_writer();
  } else {
    matcher_.end(header_);
    send_notices();
  }
}

// The matcher may have given up the memory of the frame that arrives.
void Link::drop_target() {
  if (matcher_.drops()) target_ = nullptr;
  send_notices();
}

void Link::post(PostedReceive& receive) {
  if (traits_.wake_up != Stream::WakeUp::kMailbox) ++activity_->receives;
  // Also on a link that has ended: frames that arrived before the end count.
  try {
    matcher_.post(receive);
  } catch (const WireError& error) {
    fail(error.what());
  }
  send_notices();
}

void Link::withdraw(PostedReceive& receive) {
  if (traits_.wake_up != Stream::WakeUp::kMailbox) --activity_->receives;
  if (receive.done) return;
  matcher_.withdraw(receive);
  drop_target();
}

void Link::forget(const Channel& channel) {
  matcher_.forget(channel);
  drop_target();
}

void Link::end_epoch(std::uint32_t set, std::uint32_t epoch, std::uint64_t first_dropped) {
  matcher_.end_epoch(set, epoch, first_dropped);
  drop_target();
}

bool Link::busy() const {
  if (failure_) return false;
  return !queue_.empty() || queue_.holds_frames() || stream_->pending() || matcher_.waits();
}

void Link::fail(const std::string& reason) {
  if (!failure_) {
    failure_ = reason;
    ++activity_->failures;
  }
  queue_.abandon();
  queue_.close();
}

Link::Receive::Receive(Link& link, const Channel& channel, void* data, std::size_t bytes)
    : link_(link), posted_{channel, static_cast<std::byte*>(data), bytes} {
  link_.post(posted_);
}

Link::Receive::~Receive() { link_.withdraw(posted_); }

void Link::Receive::finish() {
  if (!posted_.done) throw PeerError(HP_ABORTED, link_.peer(), *link_.failure());
}

}  // namespace horoplug
