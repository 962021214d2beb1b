// Which send goes to which recv: the state machine of one rank, without I/O.
//
// A send and a recv match if they name each other's ranks, the same process set and the same tag;
// of several, in the order of their submission. A recv may name any rank: it takes the offer of its
// set and tag that has arrived first. The sender offers its tensor, and the receiver
// answers when it has a recv for the offer:
//
//   sender                      receiver
//   send(): kOffer  ------->    receive_offer(): kept until there is a recv
//                   <-------    accept(): kAccept: dtype and shape are the same; both sides start
//                   <-------    kReject: they differ; both operations fail with one text
//   fail(): kCancel ------->    drops the offer, or fails the recv that it has started
//
// The caller chooses when a recv that has started accepts, because the transfer may need memory
// first. An offer that contains the tensor is accepted at once: there is no transfer, and a recv
// that has got the tensor does not fail even if its sender withdraws the offer meanwhile.
//
// Messages between two ranks arrive in order. Invariant: a send that starts has been accepted by
// exactly one recv, which starts too, unless one of the ranks ends.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <tuple>
#include <vector>

#include "base/status.h"
#include "controller/messages/point_to_point_messages.h"

namespace horoplug {

class PointToPointMatcher {
 public:
  explicit PointToPointMatcher(int rank) : rank_(rank) {}

  // In place of the peer of a recv: any rank.
  static constexpr int kAnyRank = -1;

  // One operation of this rank. `ticket` is the caller's name for it, unique among those that have
  // not ended.
  struct Posting {
    std::uint64_t ticket = 0;
    std::uint32_t set = 0;
    int peer = 0;  // global rank; this rank itself is allowed; of a recv also kAnyRank
    std::int32_t tag = 0;
    DType dtype = DType::kUInt8;
    Shape shape;
  };
  // `source`: where the tensor is; `data`: the tensor itself if it is to be in the offer.
  void send(const Posting& posting, Offer::Source source = Offer::Source::kCpu, Bytes data = {});
  void receive(const Posting& posting);
  // Lets the sender of a recv that has started begin. `slots`: see Accept.
  void accept(int from, std::uint64_t transfer, std::vector<std::uint32_t> slots);
  // The transfer of a recv that has started is over.
  void received(std::uint64_t ticket);

  // Messages of other ranks. Throw WireError if a message is invalid.
  void receive_offer(int from, std::uint32_t set, Offer offer);
  void receive_accept(int from, Accept accept);
  void receive_reject(int from, const Refusal& refusal);
  void receive_cancel(int from, std::uint32_t set, const Refusal& refusal);

  // Fails the operations of a process set that have no partner yet.
  void fail(std::uint32_t set, const Status& status);
  // Fails the recvs of a process set from any rank that have no partner yet.
  void fail_recvs_from_any(std::uint32_t set, const Status& status);
  // A peer has left: fails the operations with it that have no partner yet, and all later ones.
  void depart(int peer, const Status& status);
  bool has_departed(int peer) const { return departed_.contains(peer); }
  // The process set does not exist any more: drops the offers to it.
  void forget_set(std::uint32_t set);

  // What the engine is to do.
  struct Event {
    // kSent: the receiver has the tensor, which was in the offer. kDeliver: `data` is the tensor.
    enum class Kind { kSend, kSent, kReceive, kDeliver, kCopy, kFail };
    Kind kind;
    std::uint64_t ticket;
    int peer = 0;                // not kCopy, kFail
    std::uint64_t transfer = 0;  // not kCopy, kFail: its number among those from the sender
    std::uint64_t partner = 0;   // kCopy: the recv of this rank that gets what `ticket` sends
    Status status{};             // kFail; a recv may have started before
    std::vector<std::uint32_t> slots{};          // kSend: see Accept
    Offer::Source source = Offer::Source::kCpu;  // kReceive
    Bytes data{};                                // kDeliver
  };
  std::vector<Event> take_events() { return std::exchange(events_, {}); }
  struct Message {
    int to;
    Bytes bytes;
  };
  std::vector<Message> take_outgoing() { return std::exchange(outgoing_, {}); }

  // The bytes in offers to a rank that it has not answered. It may be keeping them.
  std::size_t unanswered_bytes(int peer) const;

  // Operations without a partner.
  std::size_t unmatched() const { return sends_.size() + waiting_; }

 private:
  using Key = std::tuple<std::uint32_t, int, std::int32_t>;  // process set, source, tag
  struct Sending {
    Posting posting;
    bool in_offer;
    std::size_t bytes_in_offer;
  };
  using Sends = std::map<std::uint64_t, Sending>;
  Sends::iterator find_offered(int peer, std::uint64_t send);
  Sends::iterator erase(Sends::iterator sending);
  struct Posted {
    Posting posting;
    std::uint64_t order;  // among the recvs of this rank
  };
  struct Arrived {
    Offer offer;
    std::uint64_t order;  // among the offers to this rank
  };
  using Offers = std::map<Key, std::deque<Arrived>>;
  Offers::iterator find_offer(const Posting& posting);
  void match(int from, Offer offer, const Posting& posting);
  template <typename Matches>
  void fail_unmatched(const Matches& matches, const Status& status);
  bool fail_with_departed(const Posting& posting);
  void fail_one(std::uint64_t ticket, const Status& status);
  void take_back(int from, std::uint64_t send);

  const int rank_;
  std::uint64_t last_send_ = 0;
  // By sender and process set: messages about a set that comes into being later are kept until
  // then.
  std::map<std::pair<int, std::uint32_t>, std::uint64_t> last_offer_;
  Sends sends_;                           // offered, and not answered
  std::map<int, std::size_t> in_offers_;  // bytes of sends_ that their offers contain, by rank
  std::uint64_t last_posted_ = 0;
  std::uint64_t last_arrived_ = 0;
  std::map<Key, std::deque<Posted>> postings_;
  std::size_t waiting_ = 0;  // in postings_
  Offers offers_;
  // By sender and its number of the send: recvs that have started.
  std::map<std::pair<int, std::uint64_t>, std::uint64_t> receiving_;
  std::map<int, Status> departed_;
  std::vector<Event> events_;
  std::vector<Message> outgoing_;
};

}  // namespace horoplug
