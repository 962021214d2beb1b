// Tests of the matcher without engines: messages between ranks are delivered at random times.
#include "controller/point_to_point_matcher.h"

#include <doctest/doctest.h>

#include <deque>
#include <map>
#include <random>

#include "tests/harness/cluster.h"

using namespace horoplug;
using namespace horoplug::testing;

namespace {

using Matcher = PointToPointMatcher;
using EventKind = Matcher::Event::Kind;
using Posting = Matcher::Posting;

// Ranks, and the messages between them. Messages of a pair of ranks are delivered in order.
struct Network {
  explicit Network(int size) {
    for (int rank = 0; rank < size; ++rank) ranks.emplace_back(rank);
  }

  Matcher& rank(int r) { return ranks[static_cast<std::size_t>(r)]; }

  void collect(int rank) {
    for (auto& message : this->rank(rank).take_outgoing()) {
      under_way[{rank, message.to}].push_back(std::move(message.bytes));
    }
    for (auto& event : this->rank(rank).take_events()) {
      if (event.kind == EventKind::kReceive) unaccepted.emplace_back(rank, event);
      if (event.kind == EventKind::kFail) {
        std::erase_if(unaccepted, [&](const auto& other) {
          return other.first == rank && other.second.ticket == event.ticket;
        });
      }
      events.emplace_back(rank, event);
    }
  }

  // Accepts the first recv that has started and waits for slots.
  bool accept() {
    if (unaccepted.empty()) return false;
    const auto [to, event] = unaccepted.front();
    unaccepted.pop_front();
    rank(to).accept(event.peer, event.transfer, {3, static_cast<std::uint32_t>(event.ticket)});
    collect(to);
    return true;
  }

  // Delivers the oldest message of a pair. Returns false if there is none.
  bool deliver(int from, int to) {
    auto& queue = under_way[{from, to}];
    if (queue.empty()) return false;
    const Bytes bytes = std::move(queue.front());
    queue.pop_front();
    Reader reader(bytes);
    const MessageHead head = read_head(reader);
    switch (head.kind) {
      case MessageKind::kOffer:
        rank(to).receive_offer(from, head.set, decode<Offer>(reader));
        break;
      case MessageKind::kAccept:
        rank(to).receive_accept(from, decode<Accept>(reader));
        break;
      case MessageKind::kReject:
        rank(to).receive_reject(from, decode<Refusal>(reader));
        break;
      default:
        rank(to).receive_cancel(from, head.set, decode<Refusal>(reader));
    }
    collect(to);
    return true;
  }

  void deliver_all() {
    const int size = static_cast<int>(ranks.size());
    for (bool moved = true; moved;) {
      moved = false;
      for (int from = 0; from < size; ++from) {
        collect(from);
        for (int to = 0; to < size; ++to) moved |= deliver(from, to);
      }
      moved |= accept();
    }
  }

  std::vector<std::pair<int, Matcher::Event>> take() { return std::exchange(events, {}); }

  std::vector<Matcher> ranks;
  std::map<std::pair<int, int>, std::deque<Bytes>> under_way;
  std::vector<std::pair<int, Matcher::Event>> events;
  std::deque<std::pair<int, Matcher::Event>> unaccepted;
};

Posting posting(std::uint64_t ticket, int peer, int tag = 0, Shape shape = {4},
                DType dtype = DType::kFloat32, std::uint32_t set = 0) {
  return {ticket, set, peer, tag, dtype, std::move(shape)};
}

}  // namespace

TEST_CASE("a send and a recv start on both ranks, whichever comes first") {
  for (const bool receive_first : {false, true}) {
    Network network(2);
    if (receive_first) network.rank(1).receive(posting(20, 0));
    network.rank(0).send(posting(10, 1));
    network.deliver_all();
    if (!receive_first) {
      CHECK(network.take().empty());
      CHECK(network.rank(0).unmatched() == 1);
      network.rank(1).receive(posting(20, 0));
      network.deliver_all();
    }
    const auto events = network.take();
    REQUIRE(events.size() == 2);
    CHECK(events[0].first == 1);
    CHECK(events[0].second.kind == EventKind::kReceive);
    CHECK(events[0].second.ticket == 20);
    CHECK(events[1].first == 0);
    CHECK(events[1].second.kind == EventKind::kSend);
    CHECK(events[1].second.ticket == 10);
    CHECK(events[0].second.transfer == events[1].second.transfer);
    CHECK(network.rank(0).unmatched() == 0);
    CHECK(network.rank(1).unmatched() == 0);
  }
}

TEST_CASE("sends match only recvs with the same tag and process set") {
  Network network(2);
  network.rank(0).send(posting(1, 1, 5));
  network.rank(0).send(posting(2, 1, 6));
  network.rank(0).send(posting(3, 1, 5, {4}, DType::kFloat32, 2));
  network.deliver_all();
  network.rank(1).receive(posting(13, 0, 5, {4}, DType::kFloat32, 2));
  network.rank(1).receive(posting(12, 0, 6));
  network.rank(1).receive(posting(11, 0, 5));
  network.deliver_all();
  std::map<std::uint64_t, std::uint64_t> transfers;  // by ticket
  for (const auto& [rank, event] : network.take()) transfers[event.ticket] = event.transfer;
  REQUIRE(transfers.size() == 6);
  for (const std::uint64_t send : {1, 2, 3}) CHECK(transfers[send] == transfers[send + 10]);
}

TEST_CASE("a mismatch fails both operations with both sides' values") {
  Network network(2);
  network.rank(0).send(posting(1, 1, 3, {2, 3}));
  network.rank(1).receive(posting(2, 0, 3, {3, 2}, DType::kInt64));
  network.deliver_all();
  const auto events = network.take();
  REQUIRE(events.size() == 2);
  for (const auto& [rank, event] : events) {
    CHECK(event.kind == EventKind::kFail);
    CHECK(event.status.code == HP_MISMATCH);
    CHECK(mentions(event.status, {"send from rank 0 to rank 1, tag 3", "float32 on rank 0",
                                  "int64 on rank 1", "[2, 3] on rank 0", "[3, 2] on rank 1"}));
  }
}

TEST_CASE("a recv from any rank takes the offer that has arrived first") {
  Network network(3);
  constexpr int kAny = Matcher::kAnyRank;
  network.rank(2).send(posting(21, 0, 1));
  network.deliver_all();
  network.rank(1).send(posting(11, 0));
  network.deliver_all();
  network.rank(2).send(posting(22, 0));
  network.deliver_all();
  for (const std::uint64_t ticket : {1, 2, 3}) network.rank(0).receive(posting(ticket, kAny));
  network.rank(0).receive(posting(4, kAny, 1));
  network.deliver_all();
  std::map<std::uint64_t, int> sources;  // by the ticket of the recv
  for (const auto& [rank, event] : network.take()) {
    if (rank == 0) sources[event.ticket] = event.peer;
  }
  CHECK(sources == std::map<std::uint64_t, int>{{1, 1}, {2, 2}, {4, 2}});
  CHECK(network.rank(0).unmatched() == 1);
}

TEST_CASE("an offer goes to the recv that was posted first, from its rank or from any") {
  Network network(2);
  constexpr int kAny = Matcher::kAnyRank;
  const std::vector<int> peers{1, kAny, kAny, 1};
  for (std::uint64_t ticket = 1; ticket <= peers.size(); ++ticket) {
    network.rank(0).receive(posting(ticket, peers[ticket - 1]));
  }
  for (std::uint64_t ticket = 11; ticket <= 14; ++ticket) network.rank(1).send(posting(ticket, 0));
  network.deliver_all();
  std::map<std::uint64_t, std::uint64_t> transfers;  // by ticket
  for (const auto& [rank, event] : network.take()) transfers[event.ticket] = event.transfer;
  REQUIRE(transfers.size() == 8);
  for (const std::uint64_t recv : {1, 2, 3, 4}) CHECK(transfers[recv] == transfers[recv + 10]);
}

TEST_CASE("a rank can send to itself") {
  Network network(1);
  network.rank(0).send(posting(1, 0));
  network.rank(0).receive(posting(2, 0));
  network.rank(0).receive(posting(4, 0, 1, {5}));
  network.rank(0).send(posting(3, 0, 1));
  network.collect(0);
  const auto events = network.take();
  REQUIRE(events.size() == 3);
  CHECK(events[0].second.kind == EventKind::kCopy);
  CHECK(events[0].second.ticket == 1);
  CHECK(events[0].second.partner == 2);
  CHECK(events[1].second.kind == EventKind::kFail);
  CHECK(events[2].second.kind == EventKind::kFail);
  CHECK(network.rank(0).unmatched() == 0);
}

TEST_CASE("a send that is withdrawn while it is accepted fails the recv") {
  Network network(2);
  network.rank(0).send(posting(1, 1));
  network.collect(0);
  network.rank(1).receive(posting(2, 0));
  network.deliver(0, 1);  // delivers the offer
  network.accept();       // the answer is in flight now
  network.rank(0).fail(0, {HP_DEADLOCK, "why"});
  network.deliver_all();
  const auto events = network.take();
  REQUIRE(events.size() == 3);
  CHECK(events[0].second.kind == EventKind::kReceive);
  CHECK(events[1].second.ticket == 1);
  CHECK(events[1].second.kind == EventKind::kFail);
  CHECK(events[2].second.ticket == 2);
  CHECK(events[2].second.kind == EventKind::kFail);
  CHECK(events[2].second.status.message == "why");
}

TEST_CASE("a later recv does not match an offer that was withdrawn") {
  Network network(2);
  network.rank(0).send(posting(1, 1));
  network.deliver_all();
  network.rank(0).fail(0, {HP_DEADLOCK, "why"});
  network.rank(0).send(posting(3, 1));
  network.deliver_all();
  network.rank(1).receive(posting(2, 0));
  network.deliver_all();
  std::vector<std::uint64_t> started;
  for (const auto& [rank, event] : network.take()) {
    if (event.kind != EventKind::kFail) started.push_back(event.ticket);
  }
  CHECK(started == std::vector<std::uint64_t>{2, 3});
}

TEST_CASE("operations with a rank that has left fail, and all others go on") {
  Network network(3);
  Matcher& mine = network.rank(0);
  mine.send(posting(1, 2));
  mine.receive(posting(2, 2));
  mine.receive(posting(3, 1));
  mine.receive(posting(4, Matcher::kAnyRank, 5));
  network.rank(2).send(posting(30, 0, 6));  // an offer that waits for a recv
  network.deliver_all();
  mine.depart(2, {HP_SHUT_DOWN, "it left"});
  mine.receive(posting(5, 2, 6));
  mine.send(posting(6, 2));
  mine.receive(
      posting(9, Matcher::kAnyRank, 6));  // not for rank 2's offer, whose send has failed there
  CHECK(mine.take_outgoing().empty());    // nothing for the rank that has left
  network.rank(1).send(posting(20, 0));
  network.rank(1).send(posting(21, 0, 5));
  network.rank(1).send(posting(22, 0, 6));
  network.deliver_all();
  std::vector<std::uint64_t> failed, received;
  for (const auto& [rank, event] : network.take()) {
    if (rank != 0) continue;
    if (event.kind == EventKind::kReceive) {
      received.push_back(event.ticket);
      CHECK(event.peer == 1);
    }
    if (event.kind != EventKind::kFail) continue;
    CHECK(event.status.message == "it left");
    failed.push_back(event.ticket);
  }
  CHECK(failed == std::vector<std::uint64_t>{1, 2, 5, 6});
  CHECK(received == std::vector<std::uint64_t>{3, 4, 9});
  CHECK(mine.unmatched() == 0);

  mine.receive(posting(7, Matcher::kAnyRank, 5));
  mine.receive(posting(8, 1));
  mine.fail_recvs_from_any(0, {HP_SHUT_DOWN, "all left"});
  const auto events = mine.take_events();
  REQUIRE(events.size() == 1);
  CHECK(events[0].ticket == 7);
}

TEST_CASE("invalid messages are rejected") {
  Network network(2);
  CHECK_THROWS_AS(network.rank(0).receive_accept(1, {1}), WireError);
  CHECK_THROWS_AS(network.rank(0).receive_reject(1, {1, HP_MISMATCH, ""}), WireError);
  CHECK_THROWS_AS(network.rank(0).receive_cancel(1, 0, {1, HP_MISMATCH, ""}), WireError);
  network.rank(0).receive_offer(1, 0, {2, 0, DType::kInt8, {}});
  CHECK_THROWS_AS(network.rank(0).receive_offer(1, 0, {2, 0, DType::kInt8, {}}), WireError);
  // An offer with only a part of its tensor, and slots for a tensor that has arrived already.
  network.rank(1).receive(posting(1, 0));
  CHECK_THROWS_AS(network.rank(1).receive_offer(
                      0, 0, {1, 0, DType::kFloat32, {4}, Offer::Source::kInline, Bytes(15)}),
                  WireError);
  network.rank(0).send(posting(2, 1), Offer::Source::kInline, Bytes(16));
  CHECK_THROWS_AS(network.rank(0).receive_accept(1, {1, {0}}), WireError);
}

TEST_CASE("an inline tensor arrives with its offer, and the send ends when it is accepted") {
  Network network(2);
  const Bytes data(16, std::byte{7});
  network.rank(0).send(posting(1, 1), Offer::Source::kInline, data);
  network.collect(0);
  network.rank(1).receive(posting(2, 0));
  network.deliver(0, 1);
  auto events = network.take();
  REQUIRE(events.size() == 1);
  CHECK(events[0].second.kind == EventKind::kDeliver);
  CHECK(events[0].second.ticket == 2);
  CHECK(events[0].second.data == data);
  network.deliver_all();
  events = network.take();
  REQUIRE(events.size() == 1);
  CHECK(events[0].second.kind == EventKind::kSent);
  CHECK(events[0].second.ticket == 1);
}

TEST_CASE("an inline tensor has arrived even if its send is withdrawn while it is accepted") {
  Network network(2);
  network.rank(0).send(posting(1, 1), Offer::Source::kInline, Bytes(16));
  network.collect(0);
  network.rank(1).receive(posting(2, 0));
  network.deliver(0, 1);
  network.rank(0).fail(0, {HP_DEADLOCK, "why"});
  network.deliver_all();
  const auto events = network.take();
  REQUIRE(events.size() == 2);
  CHECK(events[0].second.kind == EventKind::kDeliver);
  CHECK(events[1].second.kind == EventKind::kFail);
  CHECK(events[1].second.ticket == 1);
}

TEST_CASE("the bytes in offers to a rank count until it answers") {
  Network network(3);
  Matcher& sender = network.rank(0);
  const auto send = [&](std::uint64_t ticket, int peer, int tag) {
    sender.send(posting(ticket, peer, tag), Offer::Source::kInline, Bytes(16));
  };
  send(1, 1, 1);
  send(2, 1, 2);
  send(3, 1, 3);
  send(4, 2, 1);
  sender.send(posting(5, 1, 5));  // its tensor is not in the offer
  sender.send(posting(6, 0, 6));
  CHECK(sender.unanswered_bytes(1) == 48);
  CHECK(sender.unanswered_bytes(2) == 16);
  network.rank(1).receive(posting(20, 0, 2));
  network.deliver_all();
  CHECK(sender.unanswered_bytes(1) == 32);
  network.rank(1).receive(posting(21, 0, 1, {3}));  // a mismatch
  network.deliver_all();
  CHECK(sender.unanswered_bytes(1) == 16);
  sender.fail(0, {HP_SHUT_DOWN, "the end"});
  CHECK(sender.unanswered_bytes(1) == 0);
  CHECK(sender.unanswered_bytes(2) == 0);
}

TEST_CASE("a send starts when the recv accepts, and uses the slots in the answer") {
  Network network(2);
  network.rank(0).send(posting(1, 1), Offer::Source::kGpu);
  network.rank(1).receive(posting(2, 0));
  network.collect(0);
  network.deliver(0, 1);
  auto events = network.take();
  REQUIRE(events.size() == 1);
  CHECK(events[0].second.kind == EventKind::kReceive);
  CHECK(events[0].second.source == Offer::Source::kGpu);
  CHECK(!network.deliver(1, 0));
  network.accept();
  network.deliver_all();
  events = network.take();
  REQUIRE(events.size() == 1);
  CHECK(events[0].second.kind == EventKind::kSend);
  CHECK(events[0].second.slots == std::vector<std::uint32_t>{3, 2});
}

TEST_CASE("whatever the order of calls and messages, sends match recvs in order") {
  const std::uint64_t seed = test_seed();
  for (int round = 0; round < 300; ++round) {
    CAPTURE(seed);
    CAPTURE(round);
    std::mt19937_64 random(seed + static_cast<std::uint64_t>(round));
    const auto below = [&](int limit) {
      return static_cast<int>(random() % static_cast<unsigned>(limit));
    };
    const int size = 1 + below(4);
    Network network(size);
    // By (set, source, destination, tag): tickets of sends and recvs, in order of submission.
    using Pair = std::tuple<std::uint32_t, int, int, int>;
    std::map<Pair, std::vector<std::uint64_t>> sends, receives;
    const bool fails = below(2) == 0;
    std::uint64_t ticket = 0;
    std::map<std::uint64_t, std::uint64_t> transfer_of;
    for (int i = 0; i < 200; ++i) {
      const int from = below(size), to = below(size), tag = below(2);
      const int action = below(fails ? 11 : 10);
      const auto set = static_cast<std::uint32_t>(below(2));
      if (action < 2) {
        sends[{set, from, to, tag}].push_back(++ticket);
        // A send to the own rank needs no offer. Its first byte identifies a tensor.
        const bool in_offer = from != to && below(2) == 0;
        network.rank(from).send(posting(ticket, to, tag, {4}, DType::kFloat32, set),
                                in_offer ? Offer::Source::kInline : Offer::Source::kCpu,
                                in_offer ? Bytes(16, std::byte(ticket)) : Bytes());
        network.collect(from);
      } else if (action < 4) {
        receives[{set, from, to, tag}].push_back(++ticket);
        network.rank(to).receive(posting(ticket, from, tag, {4}, DType::kFloat32, set));
        network.collect(to);
      } else if (action < 8) {
        network.deliver(from, to);
      } else if (action < 10) {
        network.accept();
      } else if (below(10) == 0) {
        network.rank(from).fail(set, {HP_DEADLOCK, "why"});
        network.collect(from);
      }
    }
    network.deliver_all();
    std::map<std::uint64_t, std::uint64_t> partner;                    // of a recv: the send
    std::map<std::pair<int, std::uint64_t>, std::uint64_t> sent, got;  // by sender and transfer
    std::map<std::uint64_t, int> failed;
    std::map<std::uint64_t, Bytes> delivered;
    for (const auto& [rank, event] : network.take()) {
      if (event.kind == EventKind::kSend || event.kind == EventKind::kSent) {
        sent[{rank, event.transfer}] = event.ticket;
      }
      if (event.kind == EventKind::kReceive || event.kind == EventKind::kDeliver) {
        got[{event.peer, event.transfer}] = event.ticket;
      }
      if (event.kind == EventKind::kDeliver) delivered[event.ticket] = event.data;
      if (event.kind == EventKind::kCopy) partner[event.partner] = event.ticket;
      if (event.kind == EventKind::kFail) ++failed[event.ticket];
    }
    for (const auto& [transfer, receive] : got) {
      const auto send = sent.find(transfer);
      if (send != sent.end()) {
        partner[receive] = send->second;
        const auto data = delivered.find(receive);
        if (data != delivered.end()) CHECK(data->second.front() == std::byte(send->second));
      } else if (delivered.contains(receive)) {
        CHECK(failed[receive] == 0);  // the send was withdrawn after the tensor had arrived
      } else {
        CHECK(failed[receive] == 1);  // the send was withdrawn
      }
    }
    for (const auto& [transfer, send] : sent) CHECK(got.contains(transfer));
    for (const auto& [ticket_failed, times] : failed) CHECK(times <= 1);
    std::size_t unmatched = 0;
    for (const auto& [pair, list] : receives) {
      std::uint64_t last = 0;
      for (const std::uint64_t receive : list) {
        if (!partner.contains(receive)) continue;
        const auto& from = sends[pair];
        CHECK(std::find(from.begin(), from.end(), partner[receive]) != from.end());
        CHECK(partner[receive] > last);
        last = partner[receive];
      }
    }
    for (const auto& [pair, list] : sends) {
      const std::size_t most = std::min(list.size(), receives[pair].size());
      std::size_t matched = 0;
      for (const auto& [receive, send] : partner) {
        matched += std::find(list.begin(), list.end(), send) != list.end() ? 1 : 0;
      }
      if (!fails) CHECK(matched == most);
      unmatched += list.size() + receives[pair].size() - 2 * matched;
    }
    if (fails) continue;
    for (const auto& [pair, list] : receives) {
      if (!sends.contains(pair)) unmatched += list.size();
    }
    std::size_t counted = 0;
    for (const Matcher& rank : network.ranks) counted += rank.unmatched();
    CHECK(counted == unmatched);
  }
}
