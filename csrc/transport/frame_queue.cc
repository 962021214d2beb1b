#include "transport/frame_queue.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace horoplug {

// ---- queueing ----

void FrameQueue::add_control(Bytes message) {
  if (closed_) return;
  Outgoing out;
  out.header.kind = FrameHeader::kControl;
  out.header.bytes = message.size();
  out.owned = std::move(message);
  control_.push_back(std::move(out));
}

void FrameQueue::add_notice(FrameHeader::Kind kind, std::uint32_t set) {
  if (closed_) return;
  Outgoing out;
  out.header.kind = kind;
  out.header.set = set;
  control_.push_back(std::move(out));
}

std::uint64_t FrameQueue::add_data(const Channel& channel, const void* data, std::size_t bytes) {
  const std::uint64_t ticket = ++tickets_;
  const FrameSequence sequence = FrameSequence::of(channel);
  const auto same = std::ranges::find(unsent_, sequence, &Unsent::sequence);
  // Everything that was sent before in a sequence that is not listed has left.
  if (same != unsent_.end()) {
    ++same->frames;
  } else {
    unsent_.push_back({sequence, 1, ticket - 1});
  }
  if (closed_) return ticket;
  Outgoing out;
  out.header.kind = FrameHeader::kData;
  out.header.traffic = channel.traffic;
  out.header.set = channel.set;
  out.header.epoch = channel.epoch;
  out.header.batch = channel.batch;
  out.header.check = channel.check;
  out.header.bytes = bytes;
  out.data = static_cast<const std::byte*>(data);
  out.ticket = ticket;
  const auto held = held_.empty() || sequence.transfers ? held_.end() : held_.find(sequence.set);
  (held != held_.end() ? held->second : data_).push_back(std::move(out));
  return ticket;
}

bool FrameQueue::sent(const Channel& channel, std::uint64_t ticket) const {
  const auto unsent = std::ranges::find(unsent_, FrameSequence::of(channel), &Unsent::sequence);
  return unsent == unsent_.end() || unsent->last_sent >= ticket;
}

// Notes that a data frame is not queued any more: it was sent or withdrawn.
void FrameQueue::left(const Outgoing& frame, bool was_sent) {
  const auto unsent =
      std::ranges::find(unsent_, FrameSequence::of(frame.header), &Unsent::sequence);
  if (was_sent) unsent->last_sent = frame.ticket;
  if (--unsent->frames == 0) unsent_.erase(unsent);
}

// ---- what the peer or the program wants ----

void FrameQueue::hold(std::uint32_t set) {
  if (held_.size() >= kMostHeld) throw WireError("kHold for too many process sets");
  const auto [held, is_new] = held_.try_emplace(set);
  if (!is_new) throw WireError("kHold for a process set that is held already");
  const FrameSequence sequence{set, false};
  const auto first = std::stable_partition(data_.begin(), data_.end(), [&](const Outgoing& out) {
    return !(FrameSequence::of(out.header) == sequence);
  });
  std::move(first, data_.end(), std::back_inserter(held->second));
  data_.erase(first, data_.end());
}

void FrameQueue::resume(std::uint32_t set) {
  const auto held = held_.find(set);
  if (held == held_.end()) throw WireError("kResume for a process set that is not held");
  std::move(held->second.begin(), held->second.end(), std::back_inserter(data_));
  held_.erase(held);
}

bool FrameQueue::holds_frames() const {
  return std::any_of(held_.begin(), held_.end(),
                     [](const auto& entry) { return !entry.second.empty(); });
}

void FrameQueue::take_back(const Channel& channel) {
  const auto belongs = [&](const FrameHeader& header) {
    return header.kind == FrameHeader::kData && header.channel().key() == channel.key();
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
  withdraw_from(data_);
  for (auto& [set, frames] : held_) withdraw_from(frames);
}

void FrameQueue::abandon() {
  control_.clear();
  data_.clear();
  // The sets stay: the peer may still ask to resume them.
  for (auto& [set, frames] : held_) frames.clear();
  unsent_.clear();
  current_.reset();
}

// ---- sending ----

bool FrameQueue::begin_next() {
  auto& queue = control_.empty() ? data_ : control_;
  if (queue.empty()) return false;
  current_ = std::move(queue.front());
  queue.pop_front();
  done_ = 0;
  return true;
}

int FrameQueue::rest(iovec (&parts)[2]) {
  if (!current_ && !begin_next()) return 0;
  Outgoing& frame = *current_;
  const std::byte* payload =
      frame.header.kind == FrameHeader::kData ? frame.data : frame.owned.data();
  int count = 0;
  if (done_ < sizeof(FrameHeader)) {
    parts[count++] = {reinterpret_cast<std::byte*>(&frame.header) + done_,
                      sizeof(FrameHeader) - done_};
  }
  const std::size_t payload_done = done_ > sizeof(FrameHeader) ? done_ - sizeof(FrameHeader) : 0;
  if (payload_done < frame.header.bytes) {
    parts[count++] = {const_cast<std::byte*>(payload) + payload_done,
                      frame.header.bytes - payload_done};
  }
  return count;
}

}  // namespace horoplug
