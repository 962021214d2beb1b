#include "transport/link.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <system_error>
#include <tuple>
#include <utility>

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
// About the memory that a frame in the backlog takes in addition to its payload, in bytes.
constexpr std::uint64_t kFrameCost = 128;
// The peer may resume when a quarter of the limit is free. Then new data arrives before the other
// three quarters are taken, and over a slow network each resumption counts as progress.
constexpr std::uint64_t kPartsOfLimit = 4;
// Limit for the process sets that a peer can ask to hold; each takes memory here.
constexpr std::size_t kMostHeld = 4096;

}  // namespace

Link::Link(int peer, std::unique_ptr<Stream> stream, ControlHandler on_control)
    : peer_(peer), stream_(std::move(stream)), on_control_(std::move(on_control)) {}

Link::~Link() = default;

void Link::list_as_writer() {
  if (!std::exchange(listed_, true)) activity_->writers.push_back(index_);
}

void Link::send_control(Bytes message) {
  if (failure_ || close_when_empty_) return;
  ++activity_->control_messages;
  activity_->control_bytes += message.size();
  Outgoing out;
  out.header.kind = FrameHeader::kControl;
  out.header.bytes = message.size();
  out.owned = std::move(message);
  control_queue_.push_back(std::move(out));
  list_as_writer();
}

std::uint64_t Link::send(const Channel& channel, const void* data, std::size_t bytes) {
  const std::uint64_t ticket = ++tickets_;
  const Sequence sequence = sequence_of(channel);
  const auto same = std::ranges::find(unsent_, sequence, &Unsent::sequence);
  // Everything that was sent before in a sequence that is not listed has left.
  if (same != unsent_.end()) {
    ++same->frames;
  } else {
    unsent_.push_back({sequence, 1, ticket - 1});
  }
  if (failure_ || close_when_empty_) return ticket;
  Outgoing out;
  out.header.kind = FrameHeader::kData;
  out.header.set = channel.set;
  out.header.epoch = channel.epoch;
  out.header.batch = channel.batch;
  out.header.check = channel.check;
  out.header.bytes = bytes;
  out.data = static_cast<const std::byte*>(data);
  out.ticket = ticket;
  const auto held = held_.empty() || sequence.transfers ? held_.end() : held_.find(sequence.set);
  (held != held_.end() ? held->second : data_queue_).push_back(std::move(out));
  list_as_writer();
  return ticket;
}

bool Link::sent(const Channel& channel, std::uint64_t ticket) const {
  if (failure_) return true;
  const auto unsent = std::ranges::find(unsent_, sequence_of(channel), &Unsent::sequence);
  return unsent == unsent_.end() || unsent->last_sent >= ticket;
}

// Notes that a data frame is not queued any more: it was sent or withdrawn.
void Link::left(const Outgoing& frame, bool was_sent) {
  const auto unsent = std::ranges::find(unsent_, sequence_of(frame.header), &Unsent::sequence);
  if (was_sent) unsent->last_sent = frame.ticket;
  if (--unsent->frames == 0) unsent_.erase(unsent);
}

void Link::abandon_sending() {
  control_queue_.clear();
  data_queue_.clear();
  // The sets stay: the peer may still ask to resume them.
  for (auto& [set, frames] : held_) frames.clear();
  unsent_.clear();
  current_.reset();
}

// ---- flow control ----

void Link::send_notice(FrameHeader::Kind kind, std::uint32_t set) {
  if (failure_ || close_when_empty_) return;
  Outgoing out;
  out.header.kind = kind;
  out.header.set = set;
  control_queue_.push_back(std::move(out));
  list_as_writer();
}

void Link::hold(std::uint32_t set) {
  if (held_.size() >= kMostHeld) throw WireError("kHold for too many process sets");
  const auto [held, is_new] = held_.try_emplace(set);
  if (!is_new) throw WireError("kHold for a process set that is held already");
  const Sequence sequence{set, false};
  const auto first = std::stable_partition(
      data_queue_.begin(), data_queue_.end(),
      [&](const Outgoing& out) { return !(sequence_of(out.header) == sequence); });
  std::move(first, data_queue_.end(), std::back_inserter(held->second));
  data_queue_.erase(first, data_queue_.end());
}

void Link::resume(std::uint32_t set) {
  const auto held = held_.find(set);
  if (held == held_.end()) throw WireError("kResume for a process set that is not held");
  std::move(held->second.begin(), held->second.end(), std::back_inserter(data_queue_));
  held_.erase(held);
  list_as_writer();
}

bool Link::holds_frames() const {
  return std::any_of(held_.begin(), held_.end(),
                     [](const auto& entry) { return !entry.second.empty(); });
}

std::uint64_t Link::backlog() const {
  std::uint64_t sum = 0;
  for (const Backlog& backlog : backlogs_) sum += backlog.bytes;
  return sum;
}

// Adds a frame without a posted receive to its set's backlog, when the frame begins to arrive.
void Link::add_to_backlog(const FrameHeader& header) {
  if (sequence_of(header).transfers) return;
  const auto same = std::ranges::find(backlogs_, header.set, &Backlog::set);
  Backlog& backlog =
      same != backlogs_.end() ? *same : backlogs_.emplace_back(Backlog{.set = header.set});
  backlog.bytes += header.bytes + kFrameCost;
  if (backlog.held || backlog.bytes <= backlog_limit_ || has_posted_receives(header.set)) return;
  backlog.held = true;
  send_notice(FrameHeader::kHold, header.set);
}

// Removes a frame from its set's backlog: a receive has taken it, or it was dropped.
void Link::remove_from_backlog(const Sequence& sequence, std::uint64_t bytes) {
  if (sequence.transfers) return;
  const auto backlog = std::ranges::find(backlogs_, sequence.set, &Backlog::set);
  backlog->bytes -= bytes + kFrameCost;
  if (backlog->bytes <= backlog_limit_ - backlog_limit_ / kPartsOfLimit) let_peer_resume(*backlog);
  if (backlog->bytes == 0) backlogs_.erase(backlog);
}

void Link::let_peer_resume(Backlog& backlog) {
  if (std::exchange(backlog.held, false)) send_notice(FrameHeader::kResume, backlog.set);
}

// Whether a receive of a batch of the set waits for a frame that has not begun to arrive.
bool Link::has_posted_receives(std::uint32_t set) const {
  for (auto it = inboxes_.lower_bound({set, 0, 0}); it != inboxes_.end(); ++it) {
    const auto& [of_set, epoch, batch] = it->first;
    if (of_set != set || epoch >= Channel::kDownwards) return false;
    if (!it->second.posted.empty()) return true;
  }
  return false;
}

// ---- transfer ----

bool Link::take_next_frame() {
  if (current_) return true;
  auto& queue = control_queue_.empty() ? data_queue_ : control_queue_;
  if (queue.empty()) return false;
  current_ = std::move(queue.front());
  queue.pop_front();
  current_done_ = 0;
  return true;
}

bool Link::pump_write() {
  bool moved = false;
  std::uint64_t written = 0;
  while (!failure_ && written < kBytesPerPump && take_next_frame()) {
    Outgoing& frame = *current_;
    const std::byte* payload =
        frame.header.kind == FrameHeader::kData ? frame.data : frame.owned.data();
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
      written += taken;
      activity_->bytes_moved += taken;
      note_data(frame.header);
      current_done_ += taken;
    } catch (const std::system_error&) {
      // Data that the peer sent before it closed is still to be read and gives the reason. The
      // receiving side reports the end.
      abandon_sending();
      close_when_empty_ = true;
      break;
    }
    if (current_done_ == total) {
      if (frame.header.kind == FrameHeader::kData) left(frame, true);
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
  // On the stack: as a member, it would take memory in each of thousands of idle links.
  std::array<std::byte, kStagingBytes> staging;
  for (int i = 0; (i < kReadsPerPump || stream_->has_more()) && !failure_; ++i) {
    try {
      const bool direct = in_payload_ && target_ != nullptr && payload_left_ >= kDirectRead;
      const std::ptrdiff_t got = direct ? stream_->read(target_, payload_left_)
                                        : stream_->read(staging.data(), staging.size());
      if (got == 0) break;
      if (got == Stream::kEnd) {
        ended_ = true;
        fail("the connection was closed");
        break;
      }
      moved = true;
      activity_->bytes_moved += static_cast<std::uint64_t>(got);
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

void Link::check_header(const FrameHeader& header) const {
  if (header.magic != FrameHeader::kMagic) throw WireError("invalid frame header");
  if (header.kind == FrameHeader::kControl) {
    if (header.bytes > kMaxControlBytes) throw WireError("control message too large");
  } else if (header.kind == FrameHeader::kData) {
    if (header.bytes > kMaxDataBytes) throw WireError("data frame too large");
  } else if (header.kind == FrameHeader::kHold || header.kind == FrameHeader::kResume) {
    if (header.bytes > 0) throw WireError("kHold or kResume with a payload");
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
  } else if (header_.kind != FrameHeader::kData) {
    // kHold and kResume have no payload.
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
      add_to_backlog(header_);
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
  } else if (header_.kind == FrameHeader::kHold) {
    hold(header_.set);
  } else if (header_.kind == FrameHeader::kResume) {
    resume(header_.set);
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
      remove_from_backlog(sequence_of(header_), early.bytes);
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
    // The peer must not hold the frame, whatever else it has sent.
    const Sequence sequence = sequence_of(receive->channel_);
    const auto backlog = std::ranges::find(backlogs_, sequence.set, &Backlog::set);
    if (backlog != backlogs_.end() && !sequence.transfers) let_peer_resume(*backlog);
    return;
  }
  Early& early = inbox.early.front();
  if (early.bytes != receive->bytes_) {
    fail("a frame of " + std::to_string(early.bytes) + " bytes where " +
         std::to_string(receive->bytes_) + " were expected");
  } else if (early.complete) {
    std::copy_n(early.data.get(), early.bytes, receive->data_);
    receive->done_ = true;
    remove_from_backlog(sequence_of(receive->channel_), early.bytes);
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
  const auto& [set, epoch, batch] = inbox->first;
  const Sequence sequence = sequence_of(Channel{.set = set, .epoch = epoch, .batch = batch});
  for (const Early& early : inbox->second.early) remove_from_backlog(sequence, early.bytes);
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
  const auto withdraw_from = [&](std::deque<Outgoing>& queue) {
    std::erase_if(queue, [&](const Outgoing& out) {
      if (!belongs(out.header)) return false;
      left(out, false);
      return true;
    });
  };
  withdraw_from(data_queue_);
  for (auto& [set, frames] : held_) withdraw_from(frames);
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
  if (receiving_ != nullptr || !queue_empty() || holds_frames() || stream_->pending()) return true;
  return std::any_of(inboxes_.begin(), inboxes_.end(), [](const auto& entry) {
    const Inbox& inbox = entry.second;
    return !inbox.posted.empty() ||
           (!inbox.early.empty() && inbox.early.front().wanted_by != nullptr);
  });
}

void Link::fail(const std::string& reason) {
  if (!failure_) {
    failure_ = reason;
    ++activity_->failures;
  }
  abandon_sending();
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
