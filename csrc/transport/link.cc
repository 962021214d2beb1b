#include "transport/link.h"

#include <algorithm>
#include <cstring>
#include <system_error>
#include <tuple>

namespace horoplug {
namespace {

// Limit for reads per pump: a fast peer must not keep this thread from its other links.
constexpr int kReadsPerPump = 4;
// Payloads of at least this size are read directly into their destination. Smaller ones share one
// read with their header.
constexpr std::uint64_t kDirectRead = 4096;

}  // namespace

Link::Link(int peer, std::unique_ptr<Stream> stream, ControlHandler on_control)
    : peer_(peer), stream_(std::move(stream)), on_control_(std::move(on_control)) {}

Link::~Link() = default;

void Link::send_control(Bytes message) {
  if (failure_ || close_when_empty_) return;
  ++control_messages_;
  control_bytes_ += message.size();
  Outgoing out;
  out.header.kind = FrameHeader::kControl;
  out.header.bytes = message.size();
  out.owned = std::move(message);
  control_queue_.push_back(std::move(out));
}

std::uint64_t Link::send(const Channel& channel, const void* data, std::size_t bytes) {
  ++frames_queued_;
  if (failure_ || close_when_empty_) return frames_queued_;
  Outgoing out;
  out.header.kind = FrameHeader::kData;
  out.header.set = channel.set;
  out.header.epoch = channel.epoch;
  out.header.batch = channel.batch;
  out.header.check = channel.check;
  out.header.bytes = bytes;
  // Not null: null marks a withdrawn frame.
  out.data = data != nullptr ? static_cast<const std::byte*>(data) : staging_.data();
  data_queue_.push_back(std::move(out));
  return frames_queued_;
}

bool Link::take_next_frame() {
  if (current_) return true;
  while (!data_queue_.empty() && data_queue_.front().data == nullptr) {
    data_queue_.pop_front();
    ++frames_sent_;
  }
  auto& queue = control_queue_.empty() ? data_queue_ : control_queue_;
  if (queue.empty()) return false;
  current_ = std::move(queue.front());
  queue.pop_front();
  current_done_ = 0;
  return true;
}

bool Link::pump_write() {
  bool moved = false;
  while (!failure_ && take_next_frame()) {
    Outgoing& frame = *current_;
    const std::byte* payload =
        frame.header.kind == FrameHeader::kControl ? frame.owned.data() : frame.data;
    const std::size_t total = sizeof(FrameHeader) + frame.header.bytes;
    iovec parts[2];
    int count = 0;
    if (current_done_ < sizeof(FrameHeader)) {
      parts[count++] = {reinterpret_cast<std::byte*>(&frame.header) + current_done_,
                        sizeof(FrameHeader) - current_done_};
    }
    const std::size_t payload_done =
        current_done_ > sizeof(FrameHeader) ? current_done_ - sizeof(FrameHeader) : 0;
    if (payload_done < frame.header.bytes) {
      parts[count++] = {const_cast<std::byte*>(payload) + payload_done,
                        frame.header.bytes - payload_done};
    }
    try {
      const std::size_t taken = stream_->write(parts, count);
      if (taken == 0) break;
      moved = true;
      bytes_moved_ += taken;
      note_data(frame.header);
      current_done_ += taken;
    } catch (const std::system_error&) {
      // Data that the peer sent before it closed is still to be read and gives the reason. The
      // receiving side reports the end.
      control_queue_.clear();
      data_queue_.clear();
      current_.reset();
      frames_sent_ = frames_queued_;
      close_when_empty_ = true;
      break;
    }
    if (current_done_ == total) {
      if (frame.header.kind == FrameHeader::kData) ++frames_sent_;
      current_.reset();
    }
  }
  if (close_when_empty_ && queue_empty() && !write_closed_) {
    write_closed_ = true;
    stream_->close_write();
  }
  return moved;
}

// Consecutive frames of one flow need no look-up.
void Link::note_data(const FrameHeader& header) {
  if (header.kind != FrameHeader::kData) return;
  const Flow flow{header.set, header.epoch};
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

void Link::close_write() {
  close_when_empty_ = true;
  pump_write();
}

bool Link::pump_read() {
  bool moved = false;
  for (int i = 0; i < kReadsPerPump && !failure_; ++i) {
    try {
      const bool direct = in_payload_ && target_ != nullptr && payload_left_ >= kDirectRead;
      const std::ptrdiff_t got = direct ? stream_->read(target_, payload_left_)
                                        : stream_->read(staging_.data(), staging_.size());
      if (got == 0) break;
      if (got == Stream::kEnd) {
        ended_ = true;
        fail("the connection was closed");
        break;
      }
      moved = true;
      bytes_moved_ += static_cast<std::uint64_t>(got);
      if (direct) {
        target_ += got;
        payload_left_ -= static_cast<std::uint64_t>(got);
        note_data(header_);
        if (payload_left_ == 0) end_frame();
      } else {
        consume(staging_.data(), static_cast<std::size_t>(got));
      }
    } catch (const std::system_error& error) {
      ended_ = true;
      fail(std::string("the connection broke: ") + error.code().message());
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

void Link::check_header(const FrameHeader& header) const {
  if (header.magic != FrameHeader::kMagic) throw WireError("invalid frame header");
  if (header.kind == FrameHeader::kControl) {
    if (header.bytes > kMaxControlBytes) throw WireError("control message too large");
  } else if (header.kind == FrameHeader::kData) {
    if (header.bytes > kMaxDataBytes) throw WireError("data frame too large");
  } else {
    throw WireError("unknown frame kind");
  }
}

void Link::begin_frame() {
  header_have_ = 0;
  check_header(header_);
  in_payload_ = true;
  payload_left_ = header_.bytes;
  target_ = nullptr;
  receiving_ = nullptr;
  early_inbox_ = nullptr;
  discard_ = false;
  if (header_.kind == FrameHeader::kControl) {
    control_in_.resize(header_.bytes);
    target_ = control_in_.data();
  } else if (is_dropped(header_)) {
    discard_ = true;
  } else {
    Inbox& inbox = inboxes_[{header_.set, header_.epoch, header_.batch}];
    if (inbox.check == 0) inbox.check = header_.check;
    if (inbox.check != header_.check) {
      throw WireError("its batch " + std::to_string(header_.batch) + " has other contents");
    }
    if (!inbox.posted.empty()) {
      receiving_ = inbox.posted.front();
      if (receiving_->bytes_ != header_.bytes) {
        throw WireError("a frame of " + std::to_string(header_.bytes) + " bytes where " +
                        std::to_string(receiving_->bytes_) + " were expected");
      }
      inbox.posted.pop_front();
      target_ = receiving_->data_;
    } else {
      Early early;
      early.bytes = header_.bytes;
      early.data = std::make_unique_for_overwrite<std::byte[]>(header_.bytes);
      target_ = early.data.get();
      inbox.early.push_back(std::move(early));
      early_inbox_ = &inbox;
    }
  }
  if (payload_left_ == 0) end_frame();
}

void Link::end_frame() {
  in_payload_ = false;
  if (header_.kind == FrameHeader::kControl) {
    Bytes message = std::move(control_in_);
    control_in_.clear();
    on_control_(peer_, std::move(message));
  } else if (receiving_ != nullptr) {
    receiving_->done_ = true;
    receiving_ = nullptr;
  } else if (!discard_) {
    Inbox& inbox = *std::exchange(early_inbox_, nullptr);
    Early& early = inbox.early.back();
    early.complete = true;
    if (early.wanted_by != nullptr) {
      // The receive was posted while the frame arrived, so this is the only early frame left.
      std::copy_n(early.data.get(), early.bytes, early.wanted_by->data_);
      early.wanted_by->done_ = true;
      inbox.early.pop_back();
    }
  }
}

void Link::post(Receive* receive) {
  // Also on a link that has ended: frames that arrived before the end count.
  Inbox& inbox = inboxes_[receive->channel_.key()];
  if (inbox.check == 0) inbox.check = receive->channel_.check;
  if (inbox.check != receive->channel_.check) {
    fail("its batch " + std::to_string(receive->channel_.batch) + " has other contents");
    return;
  }
  if (inbox.early.empty() || inbox.early.front().wanted_by != nullptr) {
    inbox.posted.push_back(receive);
    return;
  }
  Early& early = inbox.early.front();
  if (early.bytes != receive->bytes_) {
    fail("a frame of " + std::to_string(early.bytes) + " bytes where " +
         std::to_string(receive->bytes_) + " were expected");
  } else if (early.complete) {
    std::copy_n(early.data.get(), early.bytes, receive->data_);
    receive->done_ = true;
    inbox.early.pop_front();
  } else {
    early.wanted_by = receive;
  }
}

void Link::withdraw(Receive* receive) {
  if (receive->done_) return;
  if (receiving_ == receive) {
    receiving_ = nullptr;
    target_ = nullptr;
    discard_ = true;
  }
  const auto found = inboxes_.find(receive->channel_.key());
  if (found == inboxes_.end()) return;
  std::erase(found->second.posted, receive);
  for (Early& early : found->second.early) {
    if (early.wanted_by == receive) early.wanted_by = nullptr;
  }
}

void Link::forget(const Channel& channel) {
  const auto found = inboxes_.find(channel.key());
  if (found != inboxes_.end()) forget(found);
}

void Link::forget(std::map<InboxKey, Inbox>::iterator inbox) {
  if (early_inbox_ == &inbox->second) {
    early_inbox_ = nullptr;
    target_ = nullptr;
    discard_ = true;
  }
  inboxes_.erase(inbox);
}

void Link::take_back(const Channel& channel) {
  const auto belongs = [&](const FrameHeader& header) {
    return header.kind == FrameHeader::kData &&
           std::tuple(header.set, header.epoch, header.batch) == channel.key();
  };
  if (current_ && current_->owned.empty() && belongs(current_->header)) {
    const std::byte* const data = current_->data;
    current_->owned.assign(data, data + current_->header.bytes);
    current_->data = current_->owned.data();
  }
  // Withdrawn frames stay in the queue, since tickets count frames.
  for (Outgoing& out : data_queue_) {
    if (belongs(out.header)) out.data = nullptr;
  }
}

void Link::end_epoch(std::uint32_t set, std::uint32_t epoch, std::uint64_t first_dropped) {
  auto& plans = ended_plans_[set];
  plans.emplace(epoch, first_dropped);
  if (plans.size() > kMostEndedPlans) plans.erase(plans.begin());
  for (auto it = inboxes_.begin(); it != inboxes_.end();) {
    const auto inbox = it++;
    const auto& [of_set, of_epoch, batch] = inbox->first;
    if (of_set == set && of_epoch == epoch && batch >= first_dropped) forget(inbox);
  }
}

bool Link::is_dropped(const FrameHeader& header) const {
  const auto plans = ended_plans_.find(header.set);
  if (plans == ended_plans_.end() || header.epoch == 0) return false;
  const auto found = plans->second.find(header.epoch);
  if (found != plans->second.end()) return header.batch >= found->second;
  return plans->second.size() == kMostEndedPlans && header.epoch < plans->second.begin()->first;
}

bool Link::busy() const {
  if (failure_) return false;
  if (receiving_ != nullptr || !queue_empty() || stream_->pending()) return true;
  return std::any_of(inboxes_.begin(), inboxes_.end(), [](const auto& entry) {
    const Inbox& inbox = entry.second;
    return !inbox.posted.empty() ||
           (!inbox.early.empty() && inbox.early.front().wanted_by != nullptr);
  });
}

void Link::fail(const std::string& reason) {
  if (!failure_) failure_ = reason;
  control_queue_.clear();
  data_queue_.clear();
  current_.reset();
}

Link::Receive::Receive(Link& link, const Channel& channel, void* data, std::size_t bytes)
    : link_(link), channel_(channel), data_(static_cast<std::byte*>(data)), bytes_(bytes) {
  link_.post(this);
}

Link::Receive::~Receive() { link_.withdraw(this); }

void Link::Receive::finish() {
  if (!done_) throw PeerError(HP_ABORTED, link_.peer(), *link_.failure());
}

}  // namespace horoplug
