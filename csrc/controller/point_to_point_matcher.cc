#include "controller/point_to_point_matcher.h"

#include <algorithm>
#include <utility>

namespace horoplug {
namespace {

using Event = PointToPointMatcher::Event;

// What a mismatch compares: everything else may differ.
Signature comparable(DType dtype, const Shape& shape) {
  Signature signature;
  signature.op = OpKind::kReceive;
  signature.dtype = dtype;
  signature.shapes = {shape};
  return signature;
}

}  // namespace

void PointToPointMatcher::send(const Posting& posting, Offer::Source source, Bytes data) {
  if (fail_with_departed(posting)) return;
  Offer offer{++last_send_, posting.tag, posting.dtype, posting.shape, source, std::move(data)};
  const std::size_t bytes = offer.data.size();
  sends_.emplace(offer.send, Sending{posting, source == Offer::Source::kInline, bytes});
  if (bytes > 0) in_offers_[posting.peer] += bytes;
  if (posting.peer == rank_) {
    receive_offer(rank_, posting.set, std::move(offer));
  } else {
    outgoing_.push_back({posting.peer, encode(posting.set, offer)});
  }
}

void PointToPointMatcher::receive(const Posting& posting) {
  if (fail_with_departed(posting)) return;
  const auto found = find_offer(posting);
  if (found == offers_.end()) {
    postings_[{posting.set, posting.peer, posting.tag}].push_back({posting, ++last_posted_});
    ++waiting_;
    return;
  }
  const int from = std::get<1>(found->first);
  Offer offer = std::move(found->second.front().offer);
  found->second.pop_front();
  if (found->second.empty()) offers_.erase(found);
  match(from, std::move(offer), posting);
}

// The queue whose first offer a recv gets; the end of the map if there is none.
PointToPointMatcher::Offers::iterator PointToPointMatcher::find_offer(const Posting& posting) {
  if (posting.peer != kAnyRank) return offers_.find({posting.set, posting.peer, posting.tag});
  auto first = offers_.end();
  for (auto entry = offers_.begin(); entry != offers_.end(); ++entry) {
    const auto& [set, from, tag] = entry->first;
    if (set != posting.set || tag != posting.tag) continue;
    const bool is_earlier =
        first == offers_.end() || entry->second.front().order < first->second.front().order;
    if (is_earlier) first = entry;
  }
  return first;
}

void PointToPointMatcher::receive_offer(int from, std::uint32_t set, Offer offer) {
  auto& last = last_offer_[{from, set}];
  if (offer.send <= last) throw WireError("an offer out of order");
  last = offer.send;
  const Key key{set, from, offer.tag};
  auto found = postings_.find(key);
  const auto any = postings_.find({set, kAnyRank, offer.tag});
  const bool any_is_first =
      any != postings_.end() &&
      (found == postings_.end() || any->second.front().order < found->second.front().order);
  if (any_is_first) found = any;
  if (found == postings_.end()) {
    offers_[key].push_back({std::move(offer), ++last_arrived_});
    return;
  }
  const Posting posting = found->second.front().posting;
  found->second.pop_front();
  if (found->second.empty()) postings_.erase(found);
  --waiting_;
  match(from, std::move(offer), posting);
}

void PointToPointMatcher::match(int from, Offer offer, const Posting& posting) {
  const bool same = offer.dtype == posting.dtype && offer.shape == posting.shape;
  if (!same) {
    const std::string name = "send from rank " + std::to_string(from) + " to rank " +
                             std::to_string(rank_) + ", tag " + std::to_string(offer.tag);
    // A rank that sends to itself is both.
    const Status status = mismatch(name, {{comparable(offer.dtype, offer.shape), {from}},
                                          {comparable(posting.dtype, posting.shape), {rank_}}});
    fail_one(posting.ticket, status);
    if (from == rank_) {
      fail_one(sends_.at(offer.send).posting.ticket, status);
      erase(sends_.find(offer.send));
    } else {
      outgoing_.push_back({from, encode(MessageKind::kReject, posting.set,
                                        Refusal{offer.send, status.code, status.message})});
    }
    return;
  }
  if (from == rank_) {
    events_.push_back({.kind = Event::Kind::kCopy,
                       .ticket = sends_.at(offer.send).posting.ticket,
                       .partner = posting.ticket});
    erase(sends_.find(offer.send));
    return;
  }
  if (offer.source == Offer::Source::kInline) {
    const auto elements = static_cast<std::size_t>(elements_of(posting.shape));
    if (offer.data.size() != elements * dtype_size(posting.dtype)) {
      throw WireError("an offer with a part of its tensor");
    }
    events_.push_back({.kind = Event::Kind::kDeliver,
                       .ticket = posting.ticket,
                       .peer = from,
                       .transfer = offer.send,
                       .data = std::move(offer.data)});
    return accept(from, offer.send, {});
  }
  receiving_.emplace(std::pair(from, offer.send), posting.ticket);
  events_.push_back({.kind = Event::Kind::kReceive,
                     .ticket = posting.ticket,
                     .peer = from,
                     .transfer = offer.send,
                     .source = offer.source});
}

void PointToPointMatcher::accept(int from, std::uint64_t transfer,
                                 std::vector<std::uint32_t> slots) {
  outgoing_.push_back({from, encode(Accept{transfer, std::move(slots)})});
}

void PointToPointMatcher::received(std::uint64_t ticket) {
  const auto found = std::find_if(receiving_.begin(), receiving_.end(),
                                  [&](const auto& entry) { return entry.second == ticket; });
  if (found != receiving_.end()) receiving_.erase(found);
}

void PointToPointMatcher::receive_accept(int from, Accept accept) {
  const auto found = find_offered(from, accept.send);
  if (found == sends_.end()) return;  // withdrawn: the receiver hears of it
  const bool in_offer = found->second.in_offer;
  if (in_offer && !accept.slots.empty())
    throw WireError("slots for a tensor that the receiver has already");
  events_.push_back({.kind = in_offer ? Event::Kind::kSent : Event::Kind::kSend,
                     .ticket = found->second.posting.ticket,
                     .peer = from,
                     .transfer = accept.send,
                     .slots = std::move(accept.slots)});
  erase(found);
}

void PointToPointMatcher::receive_reject(int from, const Refusal& refusal) {
  const auto found = find_offered(from, refusal.send);
  if (found == sends_.end()) return;
  fail_one(found->second.posting.ticket, {refusal.code, refusal.text});
  erase(found);
}

// The send that a peer answers; the end of the map if it was withdrawn.
PointToPointMatcher::Sends::iterator PointToPointMatcher::find_offered(int peer,
                                                                       std::uint64_t send) {
  if (send == 0 || send > last_send_) throw WireError("an answer to a send that was not offered");
  const auto found = sends_.find(send);
  if (found != sends_.end() && found->second.posting.peer != peer) {
    throw WireError("an answer to a send that was offered to another rank");
  }
  return found;
}

PointToPointMatcher::Sends::iterator PointToPointMatcher::erase(Sends::iterator sending) {
  const auto& [posting, in_offer, bytes] = sending->second;
  const auto found = in_offers_.find(posting.peer);
  if (found != in_offers_.end()) {
    found->second -= bytes;
    if (found->second == 0) in_offers_.erase(found);
  }
  return sends_.erase(sending);
}

std::size_t PointToPointMatcher::unanswered_bytes(int peer) const {
  const auto found = in_offers_.find(peer);
  return found == in_offers_.end() ? 0 : found->second;
}

void PointToPointMatcher::receive_cancel(int from, std::uint32_t set, const Refusal& refusal) {
  if (refusal.send == 0 || refusal.send > last_offer_[{from, set}]) {
    throw WireError("a cancellation of a send that was not offered");
  }
  const auto started = receiving_.find({from, refusal.send});
  if (started != receiving_.end()) {
    fail_one(started->second, {refusal.code, refusal.text});
    receiving_.erase(started);
    return;
  }
  take_back(from, refusal.send);
}

// Drops an offer, if it is still there.
void PointToPointMatcher::take_back(int from, std::uint64_t send) {
  for (auto entry = offers_.begin(); entry != offers_.end(); ++entry) {
    if (std::get<1>(entry->first) != from) continue;
    const auto erased =
        std::erase_if(entry->second, [&](const Arrived& each) { return each.offer.send == send; });
    if (erased == 0) continue;
    if (entry->second.empty()) offers_.erase(entry);
    return;
  }
}

void PointToPointMatcher::fail(std::uint32_t set, const Status& status) {
  fail_unmatched([set](const Posting& posting) { return posting.set == set; }, status);
}

void PointToPointMatcher::fail_recvs_from_any(std::uint32_t set, const Status& status) {
  fail_unmatched(
      [set](const Posting& posting) { return posting.set == set && posting.peer == kAnyRank; },
      status);
}

void PointToPointMatcher::depart(int peer, const Status& status) {
  departed_.emplace(peer, status);
  fail_unmatched([peer](const Posting& posting) { return posting.peer == peer; }, status);
  std::erase_if(offers_, [peer](const auto& entry) { return std::get<1>(entry.first) == peer; });
}

// Whether the partner of a new operation has left.
bool PointToPointMatcher::fail_with_departed(const Posting& posting) {
  const auto found = departed_.find(posting.peer);
  if (found == departed_.end()) return false;
  fail_one(posting.ticket, found->second);
  return true;
}

template <typename Matches>
void PointToPointMatcher::fail_unmatched(const Matches& matches, const Status& status) {
  for (auto entry = sends_.begin(); entry != sends_.end();) {
    const auto& [number, sending] = *entry;
    const Posting& posting = sending.posting;
    if (!matches(posting)) {
      ++entry;
      continue;
    }
    fail_one(posting.ticket, status);
    if (posting.peer == rank_) {
      take_back(rank_, number);
    } else if (!has_departed(posting.peer)) {
      outgoing_.push_back({posting.peer, encode(MessageKind::kCancel, posting.set,
                                                Refusal{number, status.code, status.message})});
    }
    entry = erase(entry);
  }
  for (auto entry = postings_.begin(); entry != postings_.end();) {
    // All of them have the same set, peer and tag.
    if (!matches(entry->second.front().posting)) {
      ++entry;
      continue;
    }
    for (const Posted& posted : entry->second) fail_one(posted.posting.ticket, status);
    waiting_ -= entry->second.size();
    entry = postings_.erase(entry);
  }
}

void PointToPointMatcher::forget_set(std::uint32_t set) {
  std::erase_if(offers_, [&](const auto& entry) { return std::get<0>(entry.first) == set; });
}

void PointToPointMatcher::fail_one(std::uint64_t ticket, const Status& status) {
  events_.push_back({.kind = Event::Kind::kFail, .ticket = ticket, .status = status});
}

}  // namespace horoplug
