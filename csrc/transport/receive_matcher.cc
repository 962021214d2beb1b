#include "transport/receive_matcher.h"

#include <algorithm>
#include <string>

#include "base/wire.h"

namespace horoplug {
namespace {

// About the memory that a frame in the backlog takes in addition to its payload, in bytes.
constexpr std::uint64_t kFrameCost = 128;
// The peer may resume when a quarter of the limit is free. Then new data arrives before the other
// three quarters are taken, and over a slow network each resumption counts as progress.
constexpr std::uint64_t kPartsOfLimit = 4;

std::string other_contents(std::uint64_t batch) {
  return "its batch " + std::to_string(batch) + " has other contents";
}

std::string other_size(std::uint64_t bytes, std::uint64_t expected) {
  return "a frame of " + std::to_string(bytes) + " bytes where " + std::to_string(expected) +
         " were expected";
}

}  // namespace

// ---- receives ----

void ReceiveMatcher::post(PostedReceive& receive) {
  Inbox& inbox = inboxes_[receive.channel.key()];
  if (inbox.check == 0) inbox.check = receive.channel.check;
  if (inbox.check != receive.channel.check) throw WireError(other_contents(receive.channel.batch));
  const FrameSequence sequence = FrameSequence::of(receive.channel);
  if (inbox.early.empty() || inbox.early.front().wanted_by != nullptr) {
    inbox.posted.push_back(&receive);
    // The peer must not hold the frame, whatever else it has sent.
    const auto backlog = std::ranges::find(backlogs_, sequence.set, &Backlog::set);
    if (backlog != backlogs_.end() && !sequence.transfers) let_peer_resume(*backlog);
    return;
  }
  Early& early = inbox.early.front();
  if (early.bytes != receive.bytes) throw WireError(other_size(early.bytes, receive.bytes));
  if (!early.complete) {
    early.wanted_by = &receive;
    return;
  }
  std::copy_n(early.data.get(), early.bytes, receive.data);
  receive.done = true;
  remove_from_backlog(sequence, early.bytes);
  inbox.early.pop_front();
}

void ReceiveMatcher::withdraw(PostedReceive& receive) {
  if (receiving_ == &receive) {
    receiving_ = nullptr;
    drops_ = true;
  }
  const auto found = inboxes_.find(receive.channel.key());
  if (found == inboxes_.end()) return;
  std::erase(found->second.posted, &receive);
  for (Early& early : found->second.early) {
    if (early.wanted_by == &receive) early.wanted_by = nullptr;
  }
}

bool ReceiveMatcher::waits() const {
  if (receiving_ != nullptr) return true;
  return std::any_of(inboxes_.begin(), inboxes_.end(), [](const auto& entry) {
    const Inbox& inbox = entry.second;
    return !inbox.posted.empty() ||
           (!inbox.early.empty() && inbox.early.front().wanted_by != nullptr);
  });
}

// ---- frames ----

std::byte* ReceiveMatcher::begin(const FrameHeader& header) {
  receiving_ = nullptr;
  early_inbox_ = nullptr;
  drops_ = is_dropped(header);
  if (drops_) return nullptr;
  Inbox& inbox = inboxes_[header.channel().key()];
  if (inbox.check == 0) inbox.check = header.check;
  if (inbox.check != header.check) throw WireError(other_contents(header.batch));
  if (!inbox.posted.empty()) {
    receiving_ = inbox.posted.front();
    if (receiving_->bytes != header.bytes) {
      throw WireError(other_size(header.bytes, receiving_->bytes));
    }
    inbox.posted.pop_front();
    return receiving_->data;
  }
  Early early;
  early.bytes = header.bytes;
  early.data = std::make_unique_for_overwrite<std::byte[]>(header.bytes);
  add_to_backlog(header);
  inbox.early.push_back(std::move(early));
  early_inbox_ = &inbox;
  return inbox.early.back().data.get();
}

void ReceiveMatcher::end_early(const FrameHeader& header) {
  Inbox& inbox = *std::exchange(early_inbox_, nullptr);
  Early& early = inbox.early.back();
  early.complete = true;
  if (early.wanted_by == nullptr) return;
  // The receive was posted while the frame arrived, so this is the only early frame left.
  std::copy_n(early.data.get(), early.bytes, early.wanted_by->data);
  early.wanted_by->done = true;
  remove_from_backlog(FrameSequence::of(header), early.bytes);
  inbox.early.pop_back();
}

void ReceiveMatcher::forget(const Channel& channel) {
  const auto found = inboxes_.find(channel.key());
  if (found != inboxes_.end()) forget(found);
}

void ReceiveMatcher::forget(Inboxes::iterator inbox) {
  if (early_inbox_ == &inbox->second) {
    early_inbox_ = nullptr;
    drops_ = true;
  }
  const auto& [set, traffic, epoch, batch] = inbox->first;
  const FrameSequence sequence = FrameSequence::of(Channel{.set = set, .traffic = traffic});
  for (const Early& early : inbox->second.early) remove_from_backlog(sequence, early.bytes);
  inboxes_.erase(inbox);
}

void ReceiveMatcher::end_epoch(std::uint32_t set, std::uint32_t epoch,
                               std::uint64_t first_dropped) {
  auto& plans = ended_plans_[set];
  plans.emplace(epoch, first_dropped);
  if (plans.size() > kMostEndedPlans) plans.erase(plans.begin());
  for (auto it = inboxes_.begin(); it != inboxes_.end();) {
    const auto inbox = it++;
    const auto& [of_set, traffic, of_epoch, batch] = inbox->first;
    const bool of_plan = of_set == set && traffic == Channel::Traffic::kBatches;
    if (of_plan && of_epoch == epoch && batch >= first_dropped) forget(inbox);
  }
}

bool ReceiveMatcher::is_dropped(const FrameHeader& header) const {
  const auto plans = ended_plans_.find(header.set);
  if (plans == ended_plans_.end() || header.epoch == 0) return false;
  const auto found = plans->second.find(header.epoch);
  if (found != plans->second.end()) return header.batch >= found->second;
  return plans->second.size() == kMostEndedPlans && header.epoch < plans->second.begin()->first;
}

// ---- flow control ----

std::uint64_t ReceiveMatcher::backlog() const {
  std::uint64_t sum = 0;
  for (const Backlog& backlog : backlogs_) sum += backlog.bytes;
  return sum;
}

// Adds a frame without a posted receive to its set's backlog, when the frame begins to arrive.
void ReceiveMatcher::add_to_backlog(const FrameHeader& header) {
  if (FrameSequence::of(header).transfers) return;
  const auto same = std::ranges::find(backlogs_, header.set, &Backlog::set);
  Backlog& backlog =
      same != backlogs_.end() ? *same : backlogs_.emplace_back(Backlog{.set = header.set});
  backlog.bytes += header.bytes + kFrameCost;
  if (backlog.held || backlog.bytes <= backlog_limit_ || has_posted_receives(header.set)) return;
  backlog.held = true;
  notices_.push_back({FrameHeader::kHold, header.set});
}

// Removes a frame from its set's backlog: a receive has taken it, or it was dropped.
void ReceiveMatcher::remove_from_backlog(const FrameSequence& sequence, std::uint64_t bytes) {
  if (sequence.transfers) return;
  const auto backlog = std::ranges::find(backlogs_, sequence.set, &Backlog::set);
  backlog->bytes -= bytes + kFrameCost;
  if (backlog->bytes <= backlog_limit_ - backlog_limit_ / kPartsOfLimit) let_peer_resume(*backlog);
  if (backlog->bytes == 0) backlogs_.erase(backlog);
}

void ReceiveMatcher::let_peer_resume(Backlog& backlog) {
  if (std::exchange(backlog.held, false)) {
    notices_.push_back({FrameHeader::kResume, backlog.set});
  }
}

// Whether a receive of a batch of the set waits for a frame that has not begun to arrive.
bool ReceiveMatcher::has_posted_receives(std::uint32_t set) const {
  const auto first = inboxes_.lower_bound(Channel{.set = set}.key());
  for (auto it = first; it != inboxes_.end(); ++it) {
    const auto& [of_set, traffic, epoch, batch] = it->first;
    if (of_set != set || traffic != Channel::Traffic::kBatches) return false;
    if (!it->second.posted.empty()) return true;
  }
  return false;
}

}  // namespace horoplug
