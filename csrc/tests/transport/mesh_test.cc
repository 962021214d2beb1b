// The links of one rank together: what a step costs when most of them are idle.
#include "transport/mesh.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "transport/absent_stream.h"

using namespace horoplug;

namespace {

struct Calls {
  int all = 0;
  int writes = 0;
};

// A stream that counts what is asked of it. It is written to and never readable.
class Counted final : public Stream {
 public:
  Counted(Calls& calls, std::size_t capacity) : calls_(calls), capacity_(capacity) {}
  std::size_t write(const iovec* parts, int count) override {
    ++calls_.all;
    ++calls_.writes;
    std::size_t taken = 0;
    for (int i = 0; i < count; ++i) taken += parts[i].iov_len;
    taken = std::min(taken, capacity_);
    capacity_ -= taken;
    return taken;
  }
  std::ptrdiff_t read(void*, std::size_t) override {
    ++calls_.all;
    return 0;
  }
  void close_write() override { ++calls_.all; }
  Traits traits() const override {
    ++calls_.all;
    return {WakeUp::kDescriptor, doorbell_.fd()};
  }

 private:
  Calls& calls_;
  std::size_t capacity_;
  Doorbell doorbell_;  // for its descriptor
};

struct Links {
  explicit Links(int ranks, std::size_t capacity = 1 << 20) {
    std::vector<std::vector<std::unique_ptr<Stream>>> lanes(static_cast<std::size_t>(ranks));
    for (std::size_t rank = 1; rank < lanes.size(); ++rank) {
      lanes[rank].push_back(std::make_unique<Counted>(calls, capacity));
    }
    mesh = std::make_unique<Mesh>(std::move(lanes), std::make_shared<Doorbell>(),
                                  [](int, const Bytes&) {});
    calls = {};
  }
  Calls calls;
  std::unique_ptr<Mesh> mesh;
};

}  // namespace

TEST_CASE("idle links cost nothing") {
  Links links(200);
  for (int i = 0; i < 10; ++i) {
    CHECK_FALSE(links.mesh->pump());
    CHECK_FALSE(links.mesh->pump_writes());
  }
  CHECK(links.calls.all == 0);
}

TEST_CASE("sockets are looked at in every step while messages are expected, and seldom otherwise") {
  // A link that is readable all the time, of which each look reads once.
  int looks = 0;
  class Readable final : public Stream {
   public:
    explicit Readable(int& reads) : reads_(reads) { doorbell_.prepare_sleep(), doorbell_.ring(); }
    std::size_t write(const iovec*, int) override { return 0; }
    std::ptrdiff_t read(void*, std::size_t) override {
      ++reads_;
      return 0;
    }
    void close_write() override {}
    Traits traits() const override { return {WakeUp::kDescriptor, doorbell_.fd()}; }

   private:
    int& reads_;
    Doorbell doorbell_;
  };
  std::vector<std::vector<std::unique_ptr<Stream>>> lanes(2);
  lanes[1].push_back(std::make_unique<Readable>(looks));
  Mesh mesh(std::move(lanes), std::make_shared<Doorbell>(), [](int, const Bytes&) {});
  const auto looks_of = [&](int steps, bool expects) {
    looks = 0;
    for (int i = 0; i < steps; ++i) mesh.pump(expects);
    return looks;
  };
  CHECK(looks_of(100, true) == 100);
  CHECK(looks_of(320, false) == 10);
  {
    std::byte received{};
    const Link::Receive receive(*mesh.link(1), {.set = 0, .epoch = 0, .batch = 1}, &received, 1);
    CHECK(looks_of(100, false) == 100);
  }
  CHECK(looks_of(320, false) == 10);
}

TEST_CASE("only links with something to write are written to") {
  Links links(200);
  links.mesh->send_control(7, Bytes(10));
  links.mesh->send_control(9, Bytes(10));
  links.mesh->send_control(7, Bytes(10));
  CHECK(links.mesh->pump_writes());
  CHECK(links.calls.writes == 3);
  links.calls = {};
  CHECK_FALSE(links.mesh->pump_writes());
  CHECK(links.calls.all == 0);
  CHECK(links.mesh->control_messages() == 3);
  CHECK(links.mesh->control_bytes() == 30);
  CHECK(links.mesh->bytes_moved() == 3 * (sizeof(FrameHeader) + 10));
}

TEST_CASE("a link that could not write everything stays a writer") {
  Links links(3, sizeof(FrameHeader) + 4);
  links.mesh->send_control(1, Bytes(10));
  CHECK(links.mesh->pump_writes());
  for (int i = 0; i < 3; ++i) {
    links.calls = {};
    CHECK_FALSE(links.mesh->pump_writes());
    CHECK(links.calls.writes == 1);
  }
  CHECK(links.mesh->link(1)->wants_write());
}

TEST_CASE("a failed link is counted once and is no writer any more") {
  Links links(3, 0);
  links.mesh->send_control(1, Bytes(10));
  CHECK(links.mesh->failures() == 0);
  links.mesh->link(1)->fail("it broke");
  links.mesh->link(1)->fail("it broke again");
  CHECK(links.mesh->failures() == 1);
  links.mesh->pump_writes();
  links.calls = {};
  CHECK_FALSE(links.mesh->pump_writes());
  CHECK(links.calls.all == 0);
}

TEST_CASE("a link without a connection asks for one when something is sent, and sends it then") {
  Calls calls;
  std::vector<std::vector<std::unique_ptr<Stream>>> lanes(4);
  for (std::size_t rank = 1; rank < lanes.size(); ++rank) {
    for (int lane = 0; lane < 2; ++lane) lanes[rank].push_back(std::make_unique<AbsentStream>());
  }
  Mesh mesh(std::move(lanes), std::make_shared<Doorbell>(), [](int, const Bytes&) {});
  CHECK(mesh.connected(0));
  CHECK_FALSE(mesh.connected(1));
  CHECK(mesh.all_closed_by_peers());
  CHECK(mesh.take_needed().empty());
  mesh.send_control_to_connected(Bytes(10));
  CHECK(mesh.take_needed().empty());
  mesh.send_control(2, Bytes(10));
  mesh.lanes(2)[1]->send({}, nullptr, 0);
  CHECK_FALSE(mesh.pump_writes());
  CHECK_FALSE(mesh.link(2)->wants_write());
  CHECK(mesh.take_needed() == std::vector{2});
  mesh.send_control(2, Bytes(10));
  CHECK(mesh.take_needed().empty());
  const auto streams = [&](std::size_t capacity) {
    std::vector<std::unique_ptr<Stream>> made;
    for (int lane = 0; lane < 2; ++lane) made.push_back(std::make_unique<Counted>(calls, capacity));
    return made;
  };
  mesh.connect(2, streams(1 << 20));
  CHECK(mesh.connected(2));
  CHECK(mesh.pump_writes());
  CHECK(mesh.bytes_moved() == 3 * sizeof(FrameHeader) + 20);
  // A second connection, and one to a rank whose link has failed, are closed.
  mesh.connect(2, streams(0));
  mesh.send_control(2, Bytes(10));
  CHECK(mesh.pump_writes());
  mesh.link(3)->fail("it cannot be reached");
  mesh.connect(3, streams(0));
  CHECK(mesh.failures() == 1);
  CHECK(mesh.failed(3)->failure() == "it cannot be reached");
}

// A link has no buffer of its own: a rank of a large job has thousands of idle ones.
static_assert(sizeof(Link) < 2048);
