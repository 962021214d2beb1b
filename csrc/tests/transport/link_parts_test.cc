// Tests of the parts of a link, without a link or a stream.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <random>
#include <string>
#include <vector>

#include "harness/cluster.h"
#include "transport/frame_queue.h"
#include "transport/receive_matcher.h"

using namespace horoplug;
using horoplug::testing::test_seed;

namespace {

constexpr Channel kPartsChannel{.set = 1, .epoch = 0, .batch = 7, .check = 9};

Bytes bytes_of(const std::string& text) {
  Bytes bytes(text.size());
  std::memcpy(bytes.data(), text.data(), text.size());
  return bytes;
}

std::string text_of(const Bytes& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

struct Frame {
  FrameHeader header;
  std::string payload;
};

// Sends the whole queue, in steps of at most this many bytes.
std::vector<Frame> send_all(FrameQueue& queue, std::size_t most = 1000) {
  Bytes sent;
  iovec parts[2];
  while (const int count = queue.rest(parts)) {
    std::size_t left = most;
    for (int i = 0; i < count; ++i) {
      const std::size_t part = std::min(left, parts[i].iov_len);
      const auto* data = static_cast<const std::byte*>(parts[i].iov_base);
      sent.insert(sent.end(), data, data + part);
      left -= part;
    }
    queue.advance(most - left);
  }
  CHECK(queue.empty());
  std::vector<Frame> frames;
  for (std::size_t at = 0; at < sent.size();) {
    Frame& frame = frames.emplace_back();
    std::memcpy(&frame.header, sent.data() + at, sizeof(FrameHeader));
    at += sizeof(FrameHeader);
    frame.payload = text_of({sent.begin() + static_cast<std::ptrdiff_t>(at),
                             sent.begin() + static_cast<std::ptrdiff_t>(at + frame.header.bytes)});
    at += frame.header.bytes;
  }
  return frames;
}

std::string payloads(const std::vector<Frame>& frames) {
  std::string all;
  for (const Frame& frame : frames) all += frame.payload + " ";
  return all;
}

FrameHeader header_of(const Channel& channel, std::size_t bytes) {
  FrameHeader header;
  header.kind = FrameHeader::kData;
  header.traffic = channel.traffic;
  header.set = channel.set;
  header.epoch = channel.epoch;
  header.batch = channel.batch;
  header.check = channel.check;
  header.bytes = bytes;
  return header;
}

// A whole data frame arrives.
void arrive(ReceiveMatcher& matcher, const Channel& channel, const std::string& payload) {
  const FrameHeader header = header_of(channel, payload.size());
  std::byte* const target = matcher.begin(header);
  if (target != nullptr) std::memcpy(target, payload.data(), payload.size());
  matcher.end(header);
}

struct Receive {
  explicit Receive(std::size_t bytes, const Channel& channel = kPartsChannel)
      : memory(bytes), posted{channel, memory.data(), bytes} {}
  std::string text() const { return text_of(memory); }

  Bytes memory;
  PostedReceive posted;
};

std::vector<std::pair<FrameHeader::Kind, std::uint32_t>> notices_of(ReceiveMatcher& matcher) {
  std::vector<std::pair<FrameHeader::Kind, std::uint32_t>> notices;
  for (const auto& [kind, set] : matcher.take_notices()) notices.emplace_back(kind, set);
  return notices;
}

}  // namespace

TEST_CASE("queued frames leave whole and in order, in writes of any size") {
  const Bytes first = bytes_of("first"), second = bytes_of("second");
  for (const std::size_t most : {1, 7, 39, 40, 41, 1000}) {
    FrameQueue queue;
    CHECK(queue.empty());
    const auto early = queue.add_data(kPartsChannel, first.data(), first.size());
    const auto late = queue.add_data(kPartsChannel, second.data(), second.size());
    CHECK(!queue.sent(kPartsChannel, early));
    const auto frames = send_all(queue, most);
    CHECK(payloads(frames) == "first second ");
    CHECK(frames[1].header.batch == kPartsChannel.batch);
    CHECK(frames[1].header.check == kPartsChannel.check);
    CHECK(queue.sent(kPartsChannel, early));
    CHECK(queue.sent(kPartsChannel, late));
  }
}

TEST_CASE("control messages overtake data frames that have not begun to leave") {
  const Bytes data = bytes_of("data");
  FrameQueue queue;
  for (int i = 0; i < 2; ++i) queue.add_data(kPartsChannel, data.data(), data.size());
  iovec parts[2];
  REQUIRE(queue.rest(parts) == 2);
  queue.advance(3);
  queue.add_control(bytes_of("control"));
  CHECK(!queue.control_has_left());
  REQUIRE(queue.rest(parts) == 2);
  CHECK(parts[0].iov_len == sizeof(FrameHeader) - 3);
  queue.advance(parts[0].iov_len + parts[1].iov_len);
  CHECK(payloads(send_all(queue)) == "control data ");
  CHECK(queue.control_has_left());
}

TEST_CASE("the batches of a set that the peer holds stay in the queue, its transfers do not") {
  const Bytes held = bytes_of("held"), later = bytes_of("later"), free = bytes_of("free");
  const Channel other{.set = 2, .epoch = 0, .batch = 1, .check = 1};
  const Channel transfer{.set = 1, .batch = 1, .check = 1, .traffic = Channel::Traffic::kUpwards};
  FrameQueue queue;
  const auto ticket = queue.add_data(kPartsChannel, held.data(), held.size());
  queue.hold(1);
  CHECK_THROWS_AS(queue.hold(1), WireError);
  CHECK_THROWS_AS(queue.resume(2), WireError);
  queue.add_data(kPartsChannel, later.data(), later.size());
  for (const Channel& channel : {other, transfer}) {
    queue.add_data(channel, free.data(), free.size());
  }
  CHECK(payloads(send_all(queue)) == "free free ");
  CHECK(queue.holds_frames());
  CHECK(!queue.sent(kPartsChannel, ticket));
  queue.resume(1);
  CHECK(payloads(send_all(queue)) == "held later ");
  CHECK(!queue.holds_frames());
  CHECK(queue.sent(kPartsChannel, ticket));
}

TEST_CASE("a frame that is taken back while it leaves is completed from a copy") {
  Bytes begun = bytes_of("begun"), queued = bytes_of("queued");
  FrameQueue queue;
  queue.add_data(kPartsChannel, begun.data(), begun.size());
  const auto ticket = queue.add_data(kPartsChannel, queued.data(), queued.size());
  iovec parts[2];
  queue.rest(parts);
  queue.advance(sizeof(FrameHeader) + 1);
  queue.take_back(kPartsChannel);
  std::ranges::fill(begun, std::byte{'x'});
  std::ranges::fill(queued, std::byte{'x'});
  REQUIRE(queue.rest(parts) == 1);
  CHECK(std::string(static_cast<const char*>(parts[0].iov_base), parts[0].iov_len) == "egun");
  queue.advance(parts[0].iov_len);
  CHECK(queue.empty());
  CHECK(queue.sent(kPartsChannel, ticket));
}

TEST_CASE("a queue that is closed takes no further frames") {
  const Bytes data = bytes_of("data");
  FrameQueue queue;
  queue.add_control(bytes_of("last"));
  queue.close();
  queue.add_control(bytes_of("late"));
  queue.add_notice(FrameHeader::kHold, 1);
  queue.add_data(kPartsChannel, data.data(), data.size());
  CHECK(payloads(send_all(queue)) == "last ");
  queue.abandon();
  CHECK(queue.sent(kPartsChannel, 1));
}

TEST_CASE("frames match the receives of their channel in order, whichever comes first") {
  std::mt19937_64 random(test_seed());
  for (int round = 0; round < 50; ++round) {
    ReceiveMatcher matcher;
    std::deque<Receive> receives;
    std::size_t arrived = 0;
    while (receives.size() < 10 || arrived < 10) {
      if (arrived == 10 || (receives.size() < 10 && random() % 2 == 0)) {
        matcher.post(receives.emplace_back(1).posted);
      } else {
        arrive(matcher, kPartsChannel, std::string(1, static_cast<char>('0' + arrived++)));
      }
      CHECK(matcher.waits() == (receives.size() > arrived));
    }
    for (std::size_t i = 0; i < 10; ++i) {
      CHECK(receives[i].posted.done);
      CHECK(receives[i].text() == std::string(1, static_cast<char>('0' + i)));
    }
    CHECK(matcher.backlog() == 0);
    CHECK(!matcher.has_notices());
    matcher.forget(kPartsChannel);
  }
}

TEST_CASE("a receive can be posted or withdrawn while its frame arrives") {
  ReceiveMatcher matcher;
  const FrameHeader header = header_of(kPartsChannel, 4);
  std::byte* const early = matcher.begin(header);
  Receive posted(4);
  matcher.post(posted.posted);
  CHECK(matcher.waits());
  std::memcpy(early, "abcd", 4);
  matcher.end(header);
  CHECK(posted.posted.done);
  CHECK(posted.text() == "abcd");

  Receive withdrawn(4);
  matcher.post(withdrawn.posted);
  CHECK(matcher.begin(header) == withdrawn.memory.data());
  matcher.withdraw(withdrawn.posted);
  CHECK(matcher.drops());
  matcher.end(header);
  CHECK(!matcher.drops());
  CHECK(!withdrawn.posted.done);

  matcher.begin(header);
  matcher.forget(kPartsChannel);
  CHECK(matcher.drops());
  matcher.end(header);
  CHECK(matcher.backlog() == 0);
}

TEST_CASE("frames and receives of other sizes or contents do not match") {
  ReceiveMatcher matcher;
  Receive small(3);
  matcher.post(small.posted);
  CHECK_THROWS_AS(matcher.begin(header_of(kPartsChannel, 4)), WireError);
  Channel other = kPartsChannel;
  other.check = 10;
  CHECK_THROWS_AS(matcher.begin(header_of(other, 3)), WireError);
  Receive receive(3, other);
  CHECK_THROWS_AS(matcher.post(receive.posted), WireError);
  Channel next = kPartsChannel;
  next.batch = 8;
  arrive(matcher, next, "early");
  Receive short_one(3, next);
  CHECK_THROWS_AS(matcher.post(short_one.posted), WireError);
  matcher.withdraw(small.posted);
}

TEST_CASE("the peer is asked to hold a set whose backlog exceeds the limit, and to resume it") {
  ReceiveMatcher matcher;
  matcher.set_backlog_limit(1000);
  const std::string frame(400, 'x');
  arrive(matcher, kPartsChannel, frame);
  CHECK(!matcher.has_notices());
  const Channel transfer{.set = 1, .batch = 1, .check = 1, .traffic = Channel::Traffic::kDownwards};
  for (int i = 0; i < 5; ++i) arrive(matcher, transfer, frame);  // not limited
  CHECK(!matcher.has_notices());
  arrive(matcher, kPartsChannel, frame);
  const std::vector hold{std::pair(FrameHeader::kHold, std::uint32_t{1})};
  CHECK(notices_of(matcher) == hold);
  arrive(matcher, kPartsChannel, frame);
  CHECK(!matcher.has_notices());  // once
  std::deque<Receive> receives;
  matcher.post(receives.emplace_back(frame.size()).posted);
  CHECK(!matcher.has_notices());
  matcher.post(receives.emplace_back(frame.size()).posted);
  const std::vector resume{std::pair(FrameHeader::kResume, std::uint32_t{1})};
  CHECK(notices_of(matcher) == resume);
  matcher.post(receives.emplace_back(frame.size()).posted);
  CHECK(matcher.backlog() == 0);
}

TEST_CASE("frames of a plan that has ended are dropped from the first withdrawn batch on") {
  ReceiveMatcher matcher;
  const auto in_batch = [](std::uint64_t batch) {
    return Channel{.set = 1, .epoch = 3, .batch = batch, .check = 1};
  };
  arrive(matcher, in_batch(5), "keep");
  arrive(matcher, in_batch(6), "drop");
  const std::uint64_t both = matcher.backlog();
  matcher.end_epoch(1, 3, 6);
  CHECK(matcher.backlog() * 2 == both);
  CHECK(matcher.begin(header_of(in_batch(7), 4)) == nullptr);
  matcher.end(header_of(in_batch(7), 4));
  Receive kept(4, in_batch(5));
  matcher.post(kept.posted);
  CHECK(kept.text() == "keep");
  CHECK(matcher.backlog() == 0);
}
