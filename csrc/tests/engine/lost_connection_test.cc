// The reason for the end of a job reaches every rank before the connections to the rank that knows
// it end.
#include <doctest/doctest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/time.h"
#include "engine/peers.h"
#include "harness/forwarding_stream.h"
#include "harness/raw_peer.h"

using namespace horoplug;
using namespace horoplug::testing;

namespace {

// Rank 0 of two, with two TCP connections to rank 1.
struct TwoLanes {
  TwoLanes() {
    std::vector<std::vector<std::unique_ptr<Stream>>> lanes(2);
    for (int lane = 0; lane < 2; ++lane) {
      StreamPair pair = tcp_pair();
      lanes[1].push_back(std::move(pair.first));
      far.push_back(std::make_unique<RawPeer>(std::move(pair.second)));
    }
    mesh = std::make_unique<Mesh>(std::move(lanes), std::make_shared<Doorbell>(),
                                  [this](int from, const Bytes& message) {
                                    ++messages;
                                    Reader reader(message);
                                    if (read_head(reader).kind != MessageKind::kBye) return;
                                    peers->receive_bye(from);
                                  });
    peers = std::make_unique<Peers>(*mesh);
  }
  void wait_for_failures(std::uint64_t count) {
    REQUIRE(comes_to([&] {
      mesh->pump();
      return mesh->failures() == count;
    }));
  }
  std::vector<std::unique_ptr<RawPeer>> far;
  std::unique_ptr<Mesh> mesh;
  std::unique_ptr<Peers> peers;
  int messages = 0;
};

// A stream that ends when the test says so.
class Cut final : public ForwardingStream {
 public:
  struct State {
    std::atomic<bool> cut = false;
    std::atomic<bool> ended = false;  // the end has been read
  };
  Cut(std::unique_ptr<Stream> stream, State& state)
      : ForwardingStream(std::move(stream)), state_(state) {}
  std::ptrdiff_t read(void* data, std::size_t bytes) override {
    if (!state_.cut) return ForwardingStream::read(data, bytes);
    state_.ended = true;
    return kEnd;
  }

 private:
  State& state_;
};

}  // namespace

TEST_CASE("a peer is lost at once if its first connection ends") {
  TwoLanes job;
  job.far[0]->hang_up();
  job.wait_for_failures(1);
  const Status status = failure_of([&] { job.peers->check_links(); });
  CHECK(status.code == HP_ABORTED);
  CHECK(mentions(status, {"rank 1 has died or lost its connection"}));
}

TEST_CASE("a peer may say why it leaves after another connection than the first one has ended") {
  for (const bool says_bye : {false, true}) {
    CAPTURE(says_bye);
    TwoLanes job;
    job.far[1]->hang_up();
    job.wait_for_failures(1);
    job.peers->check_links();
    CHECK(job.peers->undecided());
    job.far[0]->send(says_bye ? encode(MessageKind::kBye) : encode(Abort{HP_ABORTED, "why"}));
    job.far[0]->hang_up();
    job.wait_for_failures(2);
    CHECK(job.messages == 1);
    CHECK(failure_of([&] { job.peers->check_links(); }).ok() == says_bye);
    if (says_bye) CHECK_FALSE(job.peers->undecided());
  }
}

TEST_CASE(
    "a peer is lost if another connection than the first one has ended and it does not leave") {
  TwoLanes job;
  job.far[1]->hang_up();
  job.wait_for_failures(1);
  Status status;
  REQUIRE(comes_to([&] {
    status = failure_of([&] { job.peers->check_links(); });
    return !status.ok();
  }));
  CHECK(mentions(status, {"rank 1 has died or lost its connection"}));
}

TEST_CASE("a running operation fails with the reason of a peer whose other connection has ended") {
  auto configs = make_configs(Transport::kTcp, 2, test_options(), 2);
  Cut::State state;
  auto& lane = configs[0].members[1].lanes[0];
  lane = std::make_unique<Cut>(std::move(lane), state);
  Cluster cluster(std::move(configs));
  std::jthread aborting([&] {
    comes_to([&] { return state.ended.load(); });
    cluster.engine(1).abort("the reason");
  });
  cluster.run([&](int rank) {
    Engine& engine = cluster.engine(rank);
    std::vector<float> data(1 << 20, 1);  // spreads over both connections
    Order order;
    order.name = "x";
    order.shape = {static_cast<std::int64_t>(data.size())};
    order.input = order.output = data.data();
    const Status status = failure_of([&] {
      for (int step = 0;; ++step) {
        perform(engine, order);
        if (step == 3) state.cut = true;
      }
    });
    if (!mentions(status, {"the reason"})) throw std::runtime_error(status.message);
  });
}

TEST_CASE("a rank that has failed keeps its connections until the peers have closed theirs") {
  // A connection that is closed with unread data is reset, and the peer would lose the reason.
  ThirdOfJob job(0);
  job.introduce(1);
  job.introduce(2);
  job.engine->wait_until_ready();
  const SteadyTime began = steady_now();
  job.at(2).hang_up();
  job.engine->shutdown();
  CHECK(steady_now() - began >= Seconds(0.5));  // for so long, rank 1 could read the reason
}

TEST_CASE("what arrives after the end is read and dropped") {
  TwoLanes job;
  job.mesh->drop_input();
  job.far[0]->send(encode(MessageKind::kBye));
  job.far[0]->send_bytes(std::vector<std::byte>(1000, std::byte{0x5A}));
  job.far[0]->hang_up();
  job.far[1]->hang_up();
  job.wait_for_failures(2);
  CHECK(job.messages == 0);
  CHECK(*job.mesh->link(1)->failure() == "the connection was closed");
}
