// The links of the ranks of one host: bytes through mailboxes, and the change from connections to
// them.
#include <doctest/doctest.h>
#include <poll.h>
#include <sys/socket.h>

#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "harness/cluster.h"
#include "transport/mesh.h"
#include "transport/shm/mailbox_stream.h"
#include "transport/tcp/socket_stream.h"

using namespace horoplug;
using namespace horoplug::testing;

namespace {

std::pair<std::unique_ptr<Stream>, std::unique_ptr<Stream>> connected() {
  int fds[2];
  REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0);
  return {std::make_unique<SocketStream>(Fd(fds[0])), std::make_unique<SocketStream>(Fd(fds[1]))};
}

Mailbox new_mailbox(std::size_t ranks) { return Mailbox(Segment::allocate(Mailbox::bytes(ranks))); }

// Two ranks of a host, and the streams between them.
struct Two {
  Two() {
    auto [first, second] = connected();
    const auto make = [&](std::size_t rank, std::unique_ptr<Stream> connection) {
      streams[rank] =
          std::make_unique<MailboxStream>(std::move(connection), RingEnd{mailboxes[1 - rank], rank},
                                          RingEnd{mailboxes[rank], 1 - rank}, bells[1 - rank], 0);
    };
    make(0, std::move(first));
    make(1, std::move(second));
  }
  MailboxStream& operator[](std::size_t rank) { return *streams[rank]; }
  // What rank 1 writes to, and rank 0 reads.
  Mailbox::Ring& to_0() { return mailboxes[0].ring(1); }

  Mailbox mailboxes[2]{new_mailbox(2), new_mailbox(2)};
  std::shared_ptr<Doorbell> bells[2]{std::make_shared<Doorbell>(), std::make_shared<Doorbell>()};
  std::unique_ptr<MailboxStream> streams[2];
};

std::size_t write(Stream& stream, const std::string& text) {
  const iovec part{const_cast<char*>(text.data()), text.size()};
  return stream.write(&part, 1);
}

// What can be read now; "END" stands for the end.
std::string read(Stream& stream) {
  std::string all;
  while (true) {
    char data[1000];
    const std::ptrdiff_t got = stream.read(data, sizeof data);
    if (got == 0) return all;
    if (got == Stream::kEnd) return all + "END";
    all.append(data, static_cast<std::size_t>(got));
  }
}

bool rang(const Doorbell& bell) {
  pollfd event{bell.fd(), POLLIN, 0};
  return ::poll(&event, 1, 0) == 1;
}

}  // namespace

TEST_CASE(
    "a stream reads what came over its connection, then what is in its mailbox, then the end") {
  Two two;
  CHECK(write(two[1], "before ") == 7);
  two[1].begin_writing(7);
  CHECK(write(two[1], "after") == 5);
  CHECK(two[0].unread());
  CHECK(read(two[0]) == "before after");
  CHECK_FALSE(two[0].unread());

  CHECK(write(two[1], " last") == 5);
  two[1].close_write();
  two[0].note_event();
  CHECK(read(two[0]) == " lastEND");
}

TEST_CASE("a stream whose connection lags behind does not read its mailbox early") {
  Two two;
  two[1].begin_writing(6);  // which are still to come
  CHECK(write(two[1], "second") == 6);
  CHECK(read(two[0]).empty());
  CHECK(two[0].unread());
}

TEST_CASE("a rank that sleeps is woken by bytes, and a writer that sleeps by space") {
  Two two;
  two[1].begin_writing(0);
  two.bells[0]->prepare_sleep();
  CHECK(write(two[1], "x") == 1);
  CHECK(rang(*two.bells[0]));

  const std::string much(Mailbox::kRingBytes + 100, 'y');
  CHECK(write(two[1], much) == Mailbox::kRingBytes - 1);
  CHECK(write(two[1], much) == 0);
  two.bells[1]->prepare_sleep();
  CHECK_FALSE(rang(*two.bells[1]));
  CHECK(read(two[0]).size() == Mailbox::kRingBytes);
  CHECK(rang(*two.bells[1]));
  CHECK(write(two[1], much) == Mailbox::kRingBytes);
}

TEST_CASE("a rank that rests is woken when its peer waits, unless it has read the bytes") {
  Two two;
  two[1].begin_writing(0);
  const auto rest = [&] {
    two.bells[0]->prepare_sleep();
    two.bells[0]->rest();
  };
  rest();
  CHECK(write(two[1], "x") == 1);
  CHECK(read(two[0]) == "x");
  two[1].ring_if_unread();
  CHECK_FALSE(rang(*two.bells[0]));
  CHECK(write(two[1], "y") == 1);
  CHECK_FALSE(rang(*two.bells[0]));
  two[1].ring_if_unread();
  CHECK(rang(*two.bells[0]));
}

TEST_CASE("counters of a peer that cannot be right end the stream") {
  Two two;
  two[0].begin_writing(0);
  two[1].begin_writing(0);
  char data[8];
  two.to_0().written = Mailbox::kRingBytes + 1;
  CHECK_THROWS_AS(two[0].read(data, sizeof data), WireError);
  two.to_0().read = 1 << 20;  // more than was written
  CHECK_THROWS_AS(write(two[1], std::string(Mailbox::kRingBytes + 1, 'z')), std::system_error);
}

TEST_CASE("random messages arrive in order while both ranks change over to their mailboxes") {
  const std::uint64_t seed = test_seed();
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  for (int round = 0; round < (kSlowedDown ? 5 : 40); ++round) {
    Two two;
    const std::size_t total = 200'000 + random() % 400'000;
    const std::size_t change_at = random() % 3 == 0 ? 0 : random() % total;
    const std::uint64_t of_writer = random(), of_reader = random();
    std::string sent(total, '\0');
    for (char& c : sent) c = static_cast<char>(random());
    std::thread writer([&] {
      std::mt19937_64 own(of_writer);
      std::size_t at = 0;
      bool changed = false;
      while (at < total) {
        if (!changed && at >= change_at) {
          two[1].begin_writing(at);
          changed = true;
        }
        const std::size_t most = changed ? total - at : std::min(total - at, change_at - at);
        const std::size_t bytes = std::min<std::size_t>(most, 1 + own() % 100'000);
        const std::size_t taken = write(two[1], sent.substr(at, bytes));
        at += taken;
        if (taken == 0) std::this_thread::yield();
      }
      two[1].close_write();
    });
    std::mt19937_64 own(of_reader);
    std::string got;
    std::vector<char> data(100'000);
    while (true) {
      two[0].note_event();
      const std::ptrdiff_t count = two[0].read(data.data(), 1 + own() % data.size());
      if (count == Stream::kEnd) break;
      got.append(data.data(), static_cast<std::size_t>(count));
      if (count == 0) std::this_thread::yield();
    }
    writer.join();
    CHECK(got == sent);
  }
}

namespace {

// The meshes of some ranks of a host, connected with each other.
struct Host {
  explicit Host(std::size_t ranks) {
    std::vector<std::vector<std::vector<std::unique_ptr<Stream>>>> lanes(ranks);
    for (auto& of_rank : lanes) of_rank.resize(ranks);
    for (std::size_t a = 0; a < ranks; ++a) {
      neighbors.push_back({static_cast<int>(a), new_mailbox(ranks), std::make_shared<Doorbell>()});
      for (std::size_t b = a + 1; b < ranks; ++b) {
        auto [first, second] = connected();
        lanes[a][b].push_back(std::move(first));
        lanes[b][a].push_back(std::move(second));
      }
    }
    received.resize(ranks);
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      meshes.push_back(std::make_unique<Mesh>(
          std::move(lanes[rank]), neighbors[rank].doorbell, [this, rank](int from, Bytes message) {
            received[rank].emplace_back(from, std::move(message));
          }));
    }
  }
  void use_mailboxes(std::size_t rank) { meshes[rank]->use_mailboxes(neighbors, rank); }

  std::vector<Neighbor> neighbors;
  std::vector<std::unique_ptr<Mesh>> meshes;
  std::vector<std::vector<std::pair<int, Bytes>>> received;
};

}  // namespace

TEST_CASE("messages that were queued before a rank uses its mailbox leave over the connection") {
  Host host(2);
  host.meshes[1]->send_control(0, Bytes(3));
  host.use_mailboxes(1);
  // Rank 0 does not know of mailboxes yet.
  host.meshes[0]->pump();
  REQUIRE(host.received[0].size() == 1);
  host.meshes[1]->send_control(0, Bytes(4));
  host.meshes[1]->pump();
  host.use_mailboxes(0);
  for (int i = 0; i < 40; ++i) host.meshes[0]->pump();  // of which one looks at the connection
  REQUIRE(host.received[0].size() == 2);
  CHECK(host.received[0][1].second.size() == 4);
}

TEST_CASE("a rank that leaves before its peer reads its mailbox is heard to the end") {
  Host host(2);
  host.use_mailboxes(1);
  for (const std::size_t bytes : {3, 4}) {
    host.meshes[1]->send_control(0, Bytes(bytes));
    host.meshes[1]->pump();
  }
  host.meshes[1].reset();
  host.meshes[0]->pump();
  REQUIRE(host.received[0].size() == 2);
  CHECK(host.received[0][1].second.size() == 4);
  REQUIRE(host.meshes[0]->failed(1) != nullptr);
  CHECK(host.meshes[0]->failed(1)->closed_by_peer());
}

TEST_CASE("messages between all ranks of a host pass through mailboxes, however many ranks") {
  constexpr std::size_t kRanks = 70;  // more than the bits of a word
  Host host(kRanks);
  for (std::size_t rank = 0; rank < kRanks; ++rank) host.use_mailboxes(rank);
  // The first messages may pass over the connections: ranks change over when their peers have.
  for (int turn = 0; turn < 2; ++turn) {
    for (const auto& mesh : host.meshes) {
      if (turn == 0) mesh->send_control_to_connected(Bytes(1));
      for (int i = 0; i < 40; ++i) mesh->pump();
    }
  }
  for (auto& received : host.received) received.clear();
  std::vector<std::uint64_t> over_sockets;
  for (const auto& mesh : host.meshes) over_sockets.push_back(mesh->socket_bytes());
  for (std::size_t rank = 0; rank < kRanks; ++rank) {
    for (int to = 0; to < static_cast<int>(kRanks); ++to) {
      if (to != static_cast<int>(rank)) host.meshes[rank]->send_control(to, Bytes(rank + 1));
    }
    host.meshes[rank]->pump_writes();
  }
  for (std::size_t rank = 0; rank < kRanks; ++rank) {
    CHECK(host.meshes[rank]->has_silent_work());
    host.meshes[rank]->pump();
    CHECK_FALSE(host.meshes[rank]->has_silent_work());
    REQUIRE(host.received[rank].size() == kRanks - 1);
    for (const auto& [from, message] : host.received[rank]) {
      CHECK(message.size() == static_cast<std::size_t>(from) + 1);
    }
    CHECK(host.meshes[rank]->socket_bytes() == over_sockets[rank]);
  }
}

TEST_CASE("a rank of a host hears of the end of another one after its last message") {
  Host host(2);
  for (const std::size_t rank : {0, 1}) host.use_mailboxes(rank);
  host.meshes[1]->send_control(0, Bytes(5));
  host.meshes[1]->pump();
  host.meshes[1].reset();
  // A mesh with mailboxes only looks at its sockets now and then.
  for (int i = 0; i < 100 && !host.meshes[0]->failed(1); ++i) host.meshes[0]->pump();
  REQUIRE(host.received[0].size() == 1);
  REQUIRE(host.meshes[0]->failed(1) != nullptr);
  CHECK(host.meshes[0]->failed(1)->closed_by_peer());
}
