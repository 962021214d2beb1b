// Frames over a stream that writes and reads any number of bytes at a time.
#include "transport/link.h"

#include <doctest/doctest.h>

#include <deque>
#include <numeric>
#include <random>
#include <set>
#include <system_error>

#include "harness/cluster.h"
#include "transport/inproc/pipe.h"

using namespace horoplug;

namespace {

// A stream that moves at most a few bytes at a time, and sometimes none.
class Dripping final : public Stream {
 public:
  Dripping(std::unique_ptr<Stream> stream, std::uint64_t seed)
      : stream_(std::move(stream)), random_(seed) {}
  std::size_t write(const iovec* parts, int count) override {
    const std::size_t limit = random_() % 50;
    if (limit == 0 || count == 0) return 0;
    iovec part = parts[0];
    part.iov_len = std::min(part.iov_len, limit);
    return stream_->write(&part, 1);
  }
  std::ptrdiff_t read(void* data, std::size_t bytes) override {
    const std::size_t limit = random_() % 70;
    return limit == 0 ? 0 : stream_->read(data, std::min(bytes, limit));
  }
  void close_write() override { stream_->close_write(); }
  Traits traits() const override { return stream_->traits(); }

 private:
  std::unique_ptr<Stream> stream_;
  std::mt19937_64 random_;
};

// Each link writes once and reads once. True if any bytes moved.
bool pump_once(Link& one, Link& two) {
  const bool wrote = one.pump_write(), read = two.pump_read();
  const bool wrote_back = two.pump_write(), read_back = one.pump_read();
  return wrote || read || wrote_back || read_back;
}

struct Pair {
  explicit Pair(bool dripping = false) {
    auto bell = std::make_shared<Doorbell>();
    auto [one, two] = make_inproc_pipe(bell, bell);
    if (dripping) {
      one = std::make_unique<Dripping>(std::move(one), testing::test_seed());
      two = std::make_unique<Dripping>(std::move(two), testing::test_seed() + 1);
    }
    const auto remember = [this](int, Bytes message) { control.push_back(std::move(message)); };
    a = std::make_unique<Link>(1, std::move(one), remember);
    b = std::make_unique<Link>(0, std::move(two), remember);
  }
  void pump() {
    for (int quiet = 0; quiet < 200; ++quiet) {
      if (pump_once(*a, *b)) quiet = 0;
    }
  }
  std::vector<Bytes> control;
  std::unique_ptr<Link> a;
  std::unique_ptr<Link> b;
};

Bytes pattern(std::size_t bytes, int salt) {
  Bytes data(bytes);
  for (std::size_t i = 0; i < bytes; ++i)
    data[i] = static_cast<std::byte>(i * 31 + static_cast<std::size_t>(salt));
  return data;
}

constexpr Channel kChannel{3, 0, 8, 77};

}  // namespace

TEST_CASE(
    "data and control messages arrive complete and in order, however the stream splits them") {
  for (const bool dripping : {false, true}) {
    for (const bool posted_first : {false, true}) {
      CAPTURE(dripping);
      CAPTURE(posted_first);
      Pair pair(dripping);
      const std::size_t sizes[] = {0, 1, 39, 40, 41, 5000, 100'000, 0, 7};
      std::vector<Bytes> sent;
      std::vector<Bytes> got;
      for (const std::size_t size : sizes) {
        sent.push_back(pattern(size, static_cast<int>(sent.size())));
        got.emplace_back(size);
      }
      std::deque<Link::Receive> receives;
      const auto post_all = [&] {
        for (Bytes& memory : got)
          receives.emplace_back(*pair.b, kChannel, memory.data(), memory.size());
      };
      if (posted_first) post_all();
      std::uint64_t ticket = 0;
      for (const Bytes& data : sent) {
        ticket = pair.a->send(kChannel, data.data(), data.size());
        pair.a->send_control(pattern(data.size() % 100, 9));
      }
      CHECK(!pair.a->sent(kChannel, ticket));
      pair.pump();
      CHECK(pair.a->sent(kChannel, ticket));
      if (!posted_first) post_all();
      for (auto& receive : receives) {
        CHECK(receive.ready());
        CHECK_NOTHROW(receive.finish());
      }
      CHECK(got == sent);
      CHECK(pair.control.size() == sent.size());
      CHECK(!pair.a->failure());
    }
  }
}

TEST_CASE("control messages overtake queued data") {
  Pair pair;
  const Bytes large(Link::kMaxDataBytes / 64, std::byte{1});
  for (int i = 0; i < 4; ++i) pair.a->send(kChannel, large.data(), large.size());
  pair.a->pump_write();  // the pipe is full in the middle of the first frame
  pair.a->send_control(pattern(5, 1));
  Bytes first(large.size());
  Link::Receive receive(*pair.b, kChannel, first.data(), first.size());
  while (!receive.ready()) {
    pair.b->pump_read();
    if (!receive.ready()) pair.a->pump_write();
  }
  pair.a->pump_write();
  pair.b->pump_read();
  CHECK(pair.control.size() == 1);
}

TEST_CASE("channels are independent of each other") {
  Pair pair;
  const Channel other{3, 0, 9, 78};
  const Bytes one = pattern(100, 1);
  const Bytes two = pattern(100, 2);
  pair.a->send(kChannel, one.data(), one.size());
  pair.a->send(other, two.data(), two.size());
  pair.pump();
  Bytes got(100);
  Link::Receive second(*pair.b, other, got.data(), got.size());
  CHECK(second.ready());
  CHECK(got == two);
  Link::Receive first(*pair.b, kChannel, got.data(), got.size());
  CHECK(first.ready());
  CHECK(got == one);
}

TEST_CASE("a withdrawn receive leaves its memory unchanged, and the link continues") {
  for (const bool in_the_middle : {false, true}) {
    Pair pair;
    const Bytes large = pattern(1 << 20, 3);
    Bytes memory(large.size(), std::byte{0});
    auto receive = std::make_unique<Link::Receive>(*pair.b, kChannel, memory.data(), memory.size());
    pair.a->send(kChannel, large.data(), large.size());
    if (in_the_middle) {
      pair.a->pump_write();
      pair.b->pump_read();
    }
    receive.reset();
    pair.b->forget(kChannel);
    const Bytes before = memory;
    pair.pump();
    CHECK(memory == before);
    const Channel next{3, 0, 9, 5};
    const Bytes small = pattern(10, 4);
    Bytes got(10);
    pair.a->send(next, small.data(), small.size());
    pair.pump();
    Link::Receive after(*pair.b, next, got.data(), got.size());
    CHECK(after.ready());
    CHECK(got == small);
  }
}

TEST_CASE("withdrawn frames are not sent, and their memory is not read afterwards") {
  Pair pair;
  const Channel plan{3, 1, 8, 77};
  const Bytes original = pattern(4 << 20, 5);
  Bytes first = original;
  Bytes second = pattern(100, 6);
  pair.a->send(plan, first.data(), first.size());
  pair.a->send(plan, second.data(), second.size());
  pair.a->pump_write();
  REQUIRE(pair.a->wants_write());  // in the middle of the first frame
  pair.a->take_back(plan);
  std::fill(first.begin(), first.end(), std::byte{0});
  std::fill(second.begin(), second.end(), std::byte{0});

  Bytes got(original.size());
  Bytes more(second.size(), std::byte{9});
  Link::Receive begun(*pair.b, plan, got.data(), got.size());
  Link::Receive never(*pair.b, plan, more.data(), more.size());
  pair.pump();
  CHECK(begun.ready());
  CHECK(got == original);
  CHECK(!never.ready());
  CHECK(more == Bytes(second.size(), std::byte{9}));
  CHECK(!pair.a->wants_write());
}

TEST_CASE("frames of an ended plan are dropped, whether they arrive before or after its end") {
  Pair pair;
  const Bytes data = pattern(100, 7);
  const Channel kept{3, 1, 7, 1};
  const Channel dropped{3, 1, 8, 2};
  const Channel later{3, 1, 9, 3};
  const Channel next_plan{3, 2, 8, 4};
  for (const Channel& channel : {kept, dropped}) pair.a->send(channel, data.data(), data.size());
  pair.pump();
  pair.b->end_epoch(3, 1, 8);
  for (const Channel& channel : {dropped, later, next_plan}) {
    pair.a->send(channel, data.data(), data.size());
  }
  pair.pump();
  for (const Channel& channel : {kept, dropped, later, next_plan}) {
    CAPTURE(channel.epoch);
    CAPTURE(channel.batch);
    Bytes got(data.size());
    Link::Receive receive(*pair.b, channel, got.data(), got.size());
    const bool arrives = channel.epoch == 2 || channel.batch == 7;
    CHECK(receive.ready() == arrives);
    if (arrives) CHECK(got == data);
  }
  CHECK(!pair.b->failure());
}

TEST_CASE("frames of plans that ended long ago are dropped") {
  Pair pair;
  const Bytes data = pattern(10, 7);
  constexpr std::uint32_t kPlans = 100;
  for (std::uint32_t epoch = 1; epoch <= kPlans; ++epoch) pair.b->end_epoch(3, epoch, 10);
  for (std::uint32_t epoch = 0; epoch <= kPlans + 1; ++epoch) {
    CAPTURE(epoch);
    for (const std::uint64_t batch : {9, 10}) {
      CAPTURE(batch);
      const Channel channel{3, epoch, batch, 1};
      pair.a->send(channel, data.data(), data.size());
      pair.pump();
      Bytes got(data.size());
      Link::Receive receive(*pair.b, channel, got.data(), got.size());
      const bool is_current = epoch == 0 || epoch > kPlans;
      // The plans that ended last may still run batches that all ranks have joined.
      const bool may_run = is_current || (epoch > kPlans - 4 && batch == 9);
      if (may_run || batch == 10 || epoch < kPlans / 2) CHECK(receive.ready() == may_run);
    }
  }
  CHECK(!pair.b->failure());
}

TEST_CASE("ranks whose batches differ detect it at the first frame") {
  for (const bool posted_first : {false, true}) {
    for (const bool other_check : {false, true}) {
      Pair pair;
      const Bytes data = pattern(12, 1);
      Bytes got(16);
      Channel mine = kChannel;
      if (other_check) mine.check = 1;
      const std::size_t expected = other_check ? 12 : 16;
      std::unique_ptr<Link::Receive> receive;
      const auto post = [&] {
        receive = std::make_unique<Link::Receive>(*pair.b, mine, got.data(), expected);
      };
      if (posted_first) post();
      pair.a->send(kChannel, data.data(), data.size());
      pair.pump();
      if (!posted_first) post();
      REQUIRE(receive->ready());
      CHECK_THROWS_AS(receive->finish(), PeerError);
      CHECK(std::all_of(got.begin(), got.end(), [](std::byte b) { return b == std::byte{0}; }));
    }
  }
}

TEST_CASE("the end of a connection is reported after the data before it") {
  Pair pair;
  const Bytes data = pattern(4, 2);
  pair.a->send_control(pattern(3, 1));
  pair.a->send(kChannel, data.data(), data.size());
  pair.a->close_write();
  pair.pump();
  CHECK(pair.control.size() == 1);
  REQUIRE(pair.b->failure());
  CHECK(pair.b->closed_by_peer());
  Bytes memory(4);
  {
    Link::Receive early(*pair.b, kChannel, memory.data(), memory.size());
    CHECK(early.ready());
    CHECK_NOTHROW(early.finish());
    CHECK(memory == data);
  }
  Link::Receive receive(*pair.b, kChannel, memory.data(), memory.size());
  CHECK(receive.ready());
  CHECK_THROWS_AS(receive.finish(), PeerError);
}

// ---- flow control ----

namespace {

constexpr std::uint64_t kLimit = 100'000;
constexpr std::size_t kFrame = 10'000;

// Sends frames for which no receive is posted, until `b` has asked `a` to hold their process set.
void exceed_limit(Pair& pair, const Channel& channel, const Bytes& frame) {
  pair.b->set_backlog_limit(kLimit);
  for (int i = 0; i < 400; ++i) pair.a->send(channel, frame.data(), frame.size());
  pair.pump();
  REQUIRE(pair.b->backlog() > kLimit);
}

}  // namespace

TEST_CASE("data without a posted receive is bounded, and does not delay other frames") {
  Pair pair;
  pair.b->set_backlog_limit(kLimit);
  const Channel late{3, 0, 8, 77};
  const Channel later{3, 0, 9, 78};
  const Channel other{4, 0, 8, 79};
  const Channel transfer{3, 0, 1, 1, Channel::Traffic::kUpwards};
  std::vector<Bytes> sent;
  std::uint64_t ticket = 0;
  // The pipe is small, so that the sender hears of the receiver before it has written everything.
  for (int i = 0; i < 400; ++i) {
    sent.push_back(pattern(kFrame, i));
    ticket = pair.a->send(i < 350 ? late : later, sent.back().data(), kFrame);
  }
  pair.pump();
  CHECK(!pair.a->sent(later, ticket));
  CHECK(pair.b->backlog() > kLimit);
  CHECK(pair.b->backlog() < 1'000'000);
  CHECK(!pair.a->wants_write());

  for (const Channel& channel : {other, transfer}) {
    Bytes got(kFrame);
    Link::Receive receive(*pair.b, channel, got.data(), got.size());
    const std::uint64_t passing = pair.a->send(channel, sent[5].data(), kFrame);
    pair.pump();
    CHECK(receive.ready());
    CHECK(got == sent[5]);
    CHECK(pair.a->sent(channel, passing));
  }
  pair.a->send_control(pattern(3, 1));
  pair.pump();
  CHECK(pair.control.size() == 1);

  for (int i = 0; i < 400; ++i) {
    Bytes got(kFrame);
    Link::Receive receive(*pair.b, i < 350 ? late : later, got.data(), got.size());
    if (!receive.ready()) pair.pump();
    REQUIRE(receive.ready());
    CHECK(got == sent[static_cast<std::size_t>(i)]);
  }
  CHECK(pair.a->sent(later, ticket));
  CHECK(pair.b->backlog() == 0);
}

TEST_CASE("a process set continues after its held frames and its backlog were dropped") {
  for (const bool sender_first : {false, true}) {
    CAPTURE(sender_first);
    Pair pair;
    const Channel plan{3, 1, 8, 77};
    const Bytes data = pattern(kFrame, 2);
    exceed_limit(pair, plan, data);
    const auto end = [&](Link& link) {
      link.forget(plan);
      link.take_back(plan);
      link.end_epoch(3, 1, 8);
    };
    end(sender_first ? *pair.a : *pair.b);
    pair.pump();
    end(sender_first ? *pair.b : *pair.a);
    pair.pump();
    CHECK(pair.b->backlog() == 0);
    const Channel next{3, 2, 8, 78};
    Bytes got(kFrame);
    Link::Receive receive(*pair.b, next, got.data(), got.size());
    const std::uint64_t ticket = pair.a->send(next, data.data(), data.size());
    pair.pump();
    CHECK(receive.ready());
    CHECK(got == data);
    CHECK(pair.a->sent(next, ticket));
  }
}

TEST_CASE("held frames that are taken back are not sent") {
  Pair pair;
  const Channel channel{3, 0, 8, 77};
  const Bytes data = pattern(kFrame, 2);
  exceed_limit(pair, channel, data);
  pair.a->take_back(channel);
  pair.b->forget(channel);
  pair.pump();
  CHECK(pair.b->backlog() == 0);
  CHECK(!pair.a->wants_write());
}

TEST_CASE("the frame of a posted receive arrives although its process set was held") {
  Pair pair;
  pair.b->set_backlog_limit(kLimit);
  const Channel kept{3, 0, 8, 77};
  const Channel wanted{3, 0, 7, 78};
  const Bytes data = pattern(kFrame, 2);
  for (int i = 0; i < 400; ++i) pair.a->send(kept, data.data(), data.size());
  const std::uint64_t ticket = pair.a->send(wanted, data.data(), data.size());
  pair.pump();
  REQUIRE(!pair.a->sent(wanted, ticket));
  Bytes got(kFrame);
  {
    Link::Receive receive(*pair.b, wanted, got.data(), got.size());
    pair.pump();
    CHECK(receive.ready());
    CHECK(got == data);
  }
  // Afterwards the limit applies again.
  for (int i = 0; i < 400; ++i) pair.a->send(kept, data.data(), data.size());
  const std::uint64_t last = pair.a->send(wanted, data.data(), data.size());
  pair.pump();
  CHECK(!pair.a->sent(wanted, last));
  CHECK(pair.b->backlog() < 400 * (kFrame + 200) + 1'000'000);
}

namespace {

// Whether a link to which a peer sends these headers, without payloads, fails.
bool is_malformed(const std::vector<FrameHeader>& headers) {
  auto bell = std::make_shared<Doorbell>();
  auto [stream, peer] = make_inproc_pipe(bell, bell);
  Link link(1, std::move(stream), [](int, const Bytes&) {});
  for (FrameHeader header : headers) {
    iovec part{&header, sizeof header};
    REQUIRE(peer->write(&part, 1) == sizeof header);
  }
  link.pump_read();
  return link.failure() && link.failure()->find("malformed") != std::string::npos;
}

}  // namespace

TEST_CASE("a peer that asks to hold twice, or to resume what is not held, breaks the protocol") {
  FrameHeader hold;
  hold.kind = FrameHeader::kHold;
  hold.set = 3;
  FrameHeader resume = hold;
  resume.kind = FrameHeader::kResume;
  FrameHeader other = hold;
  other.set = 4;
  FrameHeader large = hold;
  large.bytes = 1;
  FrameHeader in_traffic = hold;
  in_traffic.traffic = Channel::Traffic::kUpwards;
  CHECK(!is_malformed({hold, other, resume, hold, resume}));
  CHECK(is_malformed({resume}));
  CHECK(is_malformed({hold, hold}));
  CHECK(is_malformed({hold, resume, resume}));
  CHECK(is_malformed({large}));
  CHECK(is_malformed({in_traffic}));
}

TEST_CASE("sends in either direction and batches with the same numbers are told apart") {
  using Traffic = Channel::Traffic;
  Pair pair;
  std::vector<Bytes> sent, received;
  std::deque<Link::Receive> receives;
  for (const Traffic traffic : {Traffic::kBatches, Traffic::kUpwards, Traffic::kDownwards}) {
    sent.push_back(pattern(5000, static_cast<int>(traffic)));
    received.emplace_back(5000);
  }
  const auto channel_of = [](int i) { return Channel{3, 0, 8, 77, static_cast<Traffic>(i)}; };
  for (const int i : {2, 0, 1}) pair.a->send(channel_of(i), sent[i].data(), sent[i].size());
  for (const int i : {0, 1})
    receives.emplace_back(*pair.b, channel_of(i), received[i].data(), 5000);
  pair.pump();
  receives.emplace_back(*pair.b, channel_of(2), received[2].data(), 5000);
  for (auto& receive : receives) CHECK(receive.ready());
  CHECK(received == sent);
  // Each is progress of its own.
  std::set<Link::Flow> flows;
  CHECK(pair.b->take_flows(flows));
  for (const int i : {0, 1, 2}) CHECK(flows.contains(Link::flow_of(channel_of(i))));
  CHECK(flows.size() == 3);
}

TEST_CASE("a frame of unknown traffic, or of a send in a plan, is malformed") {
  FrameHeader send;
  send.kind = FrameHeader::kData;
  send.traffic = Channel::Traffic::kDownwards;
  FrameHeader unknown = send;
  unknown.traffic = static_cast<Channel::Traffic>(3);
  FrameHeader in_plan = send;
  in_plan.epoch = 1;
  CHECK(!is_malformed({send}));
  CHECK(is_malformed({unknown}));
  CHECK(is_malformed({in_plan}));
}

TEST_CASE("a peer may ask to resume after this side can write no more") {
  struct Breaking final : Stream {
    explicit Breaking(std::unique_ptr<Stream> other) : stream(std::move(other)) {}
    std::size_t write(const iovec* parts, int count) override {
      if (broken) throw std::system_error(std::make_error_code(std::errc::broken_pipe));
      return stream->write(parts, count);
    }
    std::ptrdiff_t read(void* data, std::size_t bytes) override {
      return stream->read(data, bytes);
    }
    void close_write() override {}
    Traits traits() const override { return stream->traits(); }
    std::unique_ptr<Stream> stream;
    bool broken = false;
  };
  auto bell = std::make_shared<Doorbell>();
  auto [one, two] = make_inproc_pipe(bell, bell);
  auto breaking = std::make_unique<Breaking>(std::move(one));
  Breaking& stream = *breaking;
  std::vector<Bytes> control;
  Link a(1, std::move(breaking),
         [&](int, Bytes message) { control.push_back(std::move(message)); });
  Link b(0, std::move(two), [](int, const Bytes&) {});
  b.set_backlog_limit(kLimit);
  const Channel channel{3, 0, 8, 77};
  const Bytes data = pattern(kFrame, 2);
  for (int i = 0; i < 400; ++i) a.send(channel, data.data(), data.size());
  while (pump_once(a, b)) {
  }
  REQUIRE(b.backlog() > kLimit);
  stream.broken = true;
  a.send_control(pattern(3, 1));
  a.pump_write();
  b.forget(channel);
  b.send_control(pattern(5, 1));
  b.pump_write();
  a.pump_read();
  CHECK(!a.failure());
  CHECK(control.size() == 1);  // the reason for which the peer has left, for example
}

TEST_CASE("frames of each process set arrive in order, for random sends, receives and limits") {
  const std::uint64_t seed = testing::test_seed();
  constexpr std::uint32_t kSets = 4;
  for (std::uint64_t round = 0; round < 20; ++round) {
    CAPTURE(seed);
    CAPTURE(round);
    std::mt19937_64 random(seed + round);
    Pair pair;
    pair.b->set_backlog_limit(random() % 50'000);
    struct Set {
      std::deque<Bytes> sent;
      std::deque<std::pair<Bytes, std::unique_ptr<Link::Receive>>> posted;
      std::size_t received = 0;
      std::uint64_t last = 0;
    };
    std::vector<Set> sets(kSets);
    const auto channel_of = [](std::uint32_t set) { return Channel{set, 0, 1, 5}; };
    std::size_t total = 0;
    const auto collect = [&](Set& set) {
      for (; !set.posted.empty() && set.posted.front().second->ready(); set.posted.pop_front()) {
        REQUIRE(!pair.b->failure());
        CHECK(set.posted.front().first == set.sent[set.received]);
        ++set.received;
      }
    };
    const auto post = [&](std::uint32_t index) {
      Set& set = sets[index];
      const std::size_t next = set.received + set.posted.size();
      if (next == set.sent.size()) return;
      auto& [memory, receive] = set.posted.emplace_back(Bytes(set.sent[next].size()), nullptr);
      receive =
          std::make_unique<Link::Receive>(*pair.b, channel_of(index), memory.data(), memory.size());
    };
    for (int action = 0; action < 2000; ++action) {
      const auto index = static_cast<std::uint32_t>(random() % kSets);
      Set& set = sets[index];
      switch (random() % 4) {
        case 0:
          set.sent.push_back(pattern(random() % 3000, static_cast<int>(++total)));
          set.last =
              pair.a->send(channel_of(index), set.sent.back().data(), set.sent.back().size());
          break;
        case 1:
          post(index);
          break;
        default:
          pair.a->pump_write();
          pair.b->pump_read();
          pair.b->pump_write();
          pair.a->pump_read();
      }
      collect(set);
    }
    // One set after the other, the others' frames not received.
    for (std::uint32_t index = 0; index < kSets; ++index) {
      Set& set = sets[index];
      while (set.received < set.sent.size()) {
        const std::size_t before = set.received;
        if (set.posted.empty()) post(index);
        collect(set);
        if (set.received == before) pair.pump();
        collect(set);
        REQUIRE(set.received > before);
      }
      pair.pump();
      CHECK(pair.a->sent(channel_of(index), set.last));
    }
    CHECK(pair.b->backlog() == 0);
  }
}
