// When the time limit of each kind of wait begins and ends, whatever the engine has done before.
// The tests pass in the time.
#include <doctest/doctest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "controller/messages/messages.h"
#include "engine/handshake.h"
#include "engine/polling.h"
#include "engine/shutdown.h"
#include "engine/watchdog/watchdog.h"
#include "harness/engine_parts.h"

using namespace horoplug;
using namespace horoplug::testing;

namespace {

constexpr double kLimit = 10;

EngineOptions with_limits(double data_timeout, double operation_timeout = 1000) {
  EngineOptions options;
  options.data_timeout = Seconds(data_timeout);
  options.operation_timeout = Seconds(operation_timeout);
  return options;
}

// The time of the tests, which a rank reads.
double present = 0;
SteadyTime present_time() { return steady_at(present); }

// A rank of two whose peer is stopped. It has a watchdog and no thread.
struct WatchedRank {
  WatchedRank(int number, const EngineOptions& options, bool connected, double now)
      : ranks(connected ? make_parts(2, options) : make_parts(2, options, {{0, 1}})),
        rank(*ranks[static_cast<std::size_t>(number)]),
        peer(*ranks[static_cast<std::size_t>(1 - number)]),
        polling(rank.lifecycle, rank.registry, rank.point_to_point, rank.mesh, rank.activity),
        handshake(
            rank.config, rank.mesh, *rank.doorbell, [](const auto&) {}, read(now)),
        transfers(rank.config, rank.mesh, rank.registry, rank.point_to_point, rank.gpu,
                  rank.suspicion),
        stalls(rank.config, rank.mesh, rank.registry, rank.point_to_point, rank.handles,
               rank.suspicion, rank.peers, rank.activity, clock),
        plans(rank.config.options, rank.registry, rank.handles, rank.submissions),
        wakeups(rank.mesh, rank.registry, rank.point_to_point, polling, number),
        watchdog(rank.config, rank.lifecycle, rank.mesh, clock, handshake, transfers, stalls,
                 rank.suspicion, wakeups, plans) {
    for (const auto& each : ranks) each->registry.create_global({});
    rank.lifecycle.enter(Lifecycle::State::kRunning);
  }
  ProcessSet& set() const { return rank.registry.global(); }

  RunningTime read(double now) {
    present = now;
    return clock.now();
  }
  void watch(double now) {
    watchdog.watch(read(now));
    stalls.run();
    pump(ranks);
  }
  // Watches about every `step` seconds from `from` to `to`.
  Status watched(double from, double to, double step = 0.25) {
    return failure_of([&] {
      double now = from;
      while (now < to) {
        watch(now);
        now += step;
      }
    });
  }

  void run_batch(OpKind kind, std::uint32_t plan, double now) {
    Batch batch;
    batch.number = 1;
    batch.plan = plan;
    Order order{.op = kind, .name = "x"};
    if (kind != OpKind::kBarrier) {
      order.shape = {1};
      order.input = order.output = &value;
    }
    batch.operations = {operation_of(order, set().members())};
    set().enqueue(std::move(batch), read(now));
    CHECK(!set().poll());
    pump(ranks);
    Mesh::Movement own_data;  // Over shared memory, no link would have moved any.
    rank.mesh.take_movement(own_data);
  }
  void submit(OpKind kind, double now) {
    const OperationPtr operation = make_test_operation("x", 2, kind);
    rank.handles.add(operation);
    CHECK(set().accept(operation, read(now)).ok());
  }
  OperationPtr transfer(EngineParts& by, OpKind kind, std::int64_t count, double now) {
    OperationPtr operation = make_test_operation("x", 2, kind);
    change_signature(*operation, [&](Signature& signature) {
      signature.root = 1 - by.config.rank;
      signature.shapes = {{count}};
      signature.dtype = DType::kFloat32;
    });
    operation->tensors = {
        {reinterpret_cast<const std::byte*>(memory.data()),
         const_cast<std::byte*>(reinterpret_cast<const std::byte*>(memory.data()))}};
    operation->pending_since = read(now);
    by.handles.add(operation);
    by.point_to_point.submit(operation);
    by.point_to_point.advance(true);
    return operation;
  }
  // The peer has offered a tensor before it was stopped.
  void receive(double now) {
    transfer(peer, OpKind::kSend, 1 << 20, now);
    pump(ranks);
    for (auto& [from, message] : std::exchange(rank.received, {})) {
      Reader reader(message);
      const MessageHead head = read_head(reader);
      rank.point_to_point.receive(from, head, reader);
    }
    transfer(rank, OpKind::kReceive, 1 << 20, now);
    CHECK(rank.point_to_point.has_transfers(0));
    pump(ranks);
  }

  std::vector<std::unique_ptr<EngineParts>> ranks;
  EngineParts& rank;
  EngineParts& peer;
  RunningClock clock{present_time};
  Polling polling;
  Handshake handshake;
  TransferDeadlines transfers;
  StallInspector stalls;
  PlanDeadlines plans;
  PeerWakeUps wakeups;
  Watchdog watchdog;
  float value = 1;
  std::vector<float> memory = std::vector<float>(1 << 20);
};

std::vector<MessageKind> kinds_received(EngineParts& rank) {
  std::vector<MessageKind> kinds;
  for (const auto& [from, message] : std::exchange(rank.received, {})) {
    Reader reader(message);
    kinds.push_back(read_head(reader).kind);
  }
  return kinds;
}

struct KindOfWait {
  std::string name;
  std::function<void(WatchedRank&, double)> begin;
  int rank = 0;
  bool connected = true;
};

const std::vector<KindOfWait>& kinds_of_wait() {
  static const std::vector<KindOfWait> kinds{
      {"negotiated batch",
       [](auto& job, double now) { job.run_batch(OpKind::kAllreduce, 0, now); }},
      {"planned batch", [](auto& job, double now) { job.run_batch(OpKind::kAllreduce, 1, now); }},
      {"barrier", [](auto& job, double now) { job.run_batch(OpKind::kBarrier, 0, now); }},
      {"recv under way", [](auto& job, double now) { job.receive(now); }},
      {"recv without partner",
       [](auto& job, double now) { job.transfer(job.rank, OpKind::kReceive, 4, now); }},
      {"negotiation on the root",
       [](auto& job, double now) { job.submit(OpKind::kAllreduce, now); }},
      {"negotiation below the root",
       [](auto& job, double now) { job.submit(OpKind::kAllreduce, now); }, 1},
      {"join", [](auto& job, double now) { job.submit(OpKind::kJoin, now); }},
      {"send without a connection",
       [](auto& job, double now) { job.transfer(job.rank, OpKind::kSend, 4, now); }, 0, false},
  };
  return kinds;
}

// Expects that a wait which begins at `begin` fails at the limit, as seen by a watchdog that looks
// every `step` seconds.
void expect_limit(WatchedRank& job, const KindOfWait& kind, double begin, double step = 0.25) {
  kind.begin(job, begin);
  const Status early = job.watched(begin + 0.01, begin + kLimit, step);
  CHECK(early.ok());
  const Status late = job.watched(begin + kLimit + 0.01, begin + kLimit + 2 * step, step);
  CHECK(late.code == HP_TIMEOUT);
  CHECK(mentions(
      late, {"waiting for rank " + std::to_string(1 - kind.rank), "HOROVOD_GLOO_TIMEOUT_SECONDS"}));
}

}  // namespace

TEST_CASE("a clock of running time leaves out the time by which a reading is late") {
  RunningClock clock;
  const auto read = [&](double now) { return clock.at(steady_at(now)); };
  CHECK(read(100) == at(100));
  CHECK(read(500) == at(500));  // nothing says when a reading is due
  clock.expect_readings(Seconds(1), Seconds(2));
  CHECK(read(503) == at(503));
  CHECK(read(507) == at(504));  // 3 s late
  CHECK(read(510) == at(507));
  clock.expect_a_long_gap();
  CHECK(read(600) == at(597));
  CHECK(read(610) == at(598));
  clock.expect_readings(Seconds(10), Seconds(2));
  CHECK(read(621) == at(609));
}

TEST_CASE("the limit of each kind of wait begins with the wait after an idle or a busy time") {
  for (const KindOfWait& kind : kinds_of_wait()) {
    CAPTURE(kind.name);
    // Seconds without a look before the wait begins: none, one long step, an idle time.
    for (const double before : {0.2, 7.0, 300.0}) {
      CAPTURE(before);
      WatchedRank job(kind.rank, with_limits(kLimit), kind.connected, 1000);
      expect_limit(job, kind, 1000 + before);
    }
  }
}

TEST_CASE("a rank that gets its processor rarely reaches the limit nevertheless") {
  for (const KindOfWait& kind : kinds_of_wait()) {
    CAPTURE(kind.name);
    WatchedRank job(kind.rank, with_limits(kLimit), kind.connected, 1000);
    expect_limit(job, kind, 1100, 1.1);
  }
}

TEST_CASE("time in which a waiting rank was stopped itself does not count, in any kind of wait") {
  for (const KindOfWait& kind : kinds_of_wait()) {
    CAPTURE(kind.name);
    WatchedRank job(kind.rank, with_limits(kLimit), kind.connected, 1000);
    kind.begin(job, 1000);
    CHECK(job.watched(1000.01, 1004).ok());
    // Stopped from then on, for 60 seconds.
    CHECK(job.watched(1064, 1000 + 59 + kLimit).ok());
    CHECK(job.watched(1000 + 59 + kLimit, 1062 + kLimit).code == HP_TIMEOUT);
  }
}

TEST_CASE("the limit of an operation holds for each kind of wait, and the error says so") {
  for (const KindOfWait& kind : kinds_of_wait()) {
    CAPTURE(kind.name);
    WatchedRank job(kind.rank, with_limits(1000, kLimit), kind.connected, 1000);
    kind.begin(job, 1050);
    CHECK(job.watched(1050.01, 1050 + kLimit).ok());
    const Status late = job.watched(1050.01 + kLimit, 1050.6 + kLimit);
    CHECK(late.code == HP_TIMEOUT);
    CHECK(mentions(late, {"HOROPLUG_OPERATION_TIMEOUT_SECONDS"}));
  }
}

TEST_CASE("limits that are changed while an operation waits hold for it, in each kind of wait") {
  for (const KindOfWait& kind : kinds_of_wait()) {
    CAPTURE(kind.name);
    for (const bool longer : {true, false}) {
      CAPTURE(longer);
      const double before = longer ? kLimit / 2 : 1000;
      WatchedRank job(kind.rank, with_limits(before, 2 * before), kind.connected, 1000);
      kind.begin(job, 1050);
      CHECK(job.watched(1050.01, 1050 + kLimit / 4).ok());
      job.rank.config.options.data_timeout = Seconds(kLimit);
      job.rank.config.options.operation_timeout = Seconds(2 * kLimit);
      CHECK(job.watched(1050.01 + kLimit / 4, 1050 + kLimit).ok());
      const Status late = job.watched(1050.01 + kLimit, 1050.6 + kLimit);
      CHECK(late.code == HP_TIMEOUT);
      CHECK(mentions(late, {"HOROVOD_GLOO_TIMEOUT_SECONDS"}));
    }
  }
}

TEST_CASE("the watchdog pings a peer from half of the limit on, once until it answers") {
  WatchedRank job(0, with_limits(kLimit), true, 1000);
  job.run_batch(OpKind::kAllreduce, 0, 1000);
  CHECK(job.watched(1000.01, 1004.9).ok());
  CHECK(kinds_received(job.peer) == std::vector<MessageKind>{});
  CHECK(job.watched(1005.01, 1009.5).ok());
  CHECK(kinds_received(job.peer) == std::vector{MessageKind::kPing});
}

TEST_CASE("a plan stands still for as long after an idle time as after a busy one") {
  WatchedRank job(0, with_limits(kLimit), true, 1000);
  job.run_batch(OpKind::kAllreduce, 1, 1500);
  job.watch(1500.1);
  CHECK(job.set().last_progress() <= job.read(1500.1));
}

TEST_CASE("peers have time to agree to a shutdown after the last batch has ended") {
  WatchedRank job(0, with_limits(kLimit), true, 100);
  EngineParts& rank = job.rank;
  Counters counters;
  Shutdown shutdown({.config = rank.config,
                     .lifecycle = rank.lifecycle,
                     .mesh = rank.mesh,
                     .peers = rank.peers,
                     .registry = rank.registry,
                     .point_to_point = rank.point_to_point,
                     .submissions = rank.submissions,
                     .completion = rank.completion,
                     .gpu = rank.gpu,
                     .transfers = job.transfers,
                     .tracing = rank.tracing,
                     .counters = counters});
  job.run_batch(OpKind::kAllreduce, 0, 100);
  CHECK(shutdown.advance(at(100)));
  for (const double now : {101.0, 104.0, 107.0}) CHECK(!shutdown.advance(at(now)));
  job.set().take_all();
  CHECK(!shutdown.advance(at(108.5)));
  CHECK(failure_of([&] { shutdown.advance(at(109.5)); }).code == HP_SHUT_DOWN);
}
