// The watchdog and its parts without an engine. The tests pass in the time, except where the age of
// an operation is taken from the clock.
#include "engine/watchdog/watchdog.h"

#include <doctest/doctest.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <functional>
#include <future>
#include <latch>
#include <mutex>
#include <thread>

#include "controller/messages/messages.h"
#include "engine/handshake.h"
#include "engine/operations/submission.h"
#include "engine/polling.h"
#include "engine/watchdog/plan_deadlines.h"
#include "engine/watchdog/stall_inspector.h"
#include "engine/watchdog/transfer_deadlines.h"
#include "harness/engine_parts.h"

using namespace horoplug;
using namespace horoplug::testing;
using namespace std::chrono_literals;

namespace {

// The stall inspectors of all ranks, which exchange messages.
struct Inspectors {
  explicit Inspectors(const std::vector<std::unique_ptr<EngineParts>>& given) : ranks(given) {
    for (const auto& rank : ranks) {
      rank->registry.create_global({});
      inspectors.push_back(std::make_unique<StallInspector>(
          rank->config, rank->mesh, rank->registry, rank->point_to_point, rank->handles,
          rank->suspicion, rank->peers, rank->activity, rank->clock));
    }
  }
  // Every rank but `silent` runs its inspector until no message is left.
  void run(int silent = -1) {
    for (int round = 0; round < 8; ++round) {
      for (std::size_t i = 0; i < ranks.size(); ++i) {
        if (static_cast<int>(i) != silent) inspectors[i]->run();
      }
      pump(ranks);
      for (std::size_t i = 0; i < ranks.size(); ++i) {
        for (auto& [from, message] : std::exchange(ranks[i]->received, {})) {
          if (static_cast<int>(i) != silent) deliver(*inspectors[i], from, message);
        }
      }
    }
  }
  static void deliver(StallInspector& inspector, int from, const Bytes& message) {
    Reader reader(message);
    switch (read_head(reader).kind) {
      case MessageKind::kInspectionRequest:
        return inspector.receive(decode<InspectionRequest>(reader));
      case MessageKind::kInspection:
        return inspector.receive(from, decode<InspectionQuestion>(reader));
      case MessageKind::kReport:
        return inspector.receive(from, decode<Report>(reader));
      default:
        return;
    }
  }
  // An operation of a rank that has been pending for so long.
  OperationPtr pending(int rank, const std::string& name, double seconds) {
    EngineParts& parts = *ranks[static_cast<std::size_t>(rank)];
    OperationPtr operation = make_test_operation(name, static_cast<int>(ranks.size()));
    parts.handles.add(operation);
    CHECK(parts.registry.global().accept(operation, parts.clock.now() - Seconds(seconds)).ok());
    return operation;
  }
  const std::vector<std::unique_ptr<EngineParts>>& ranks;
  std::vector<std::unique_ptr<StallInspector>> inspectors;
};

constexpr double kSecondsToAnswer = 2.5;  // at a limit of 10 seconds

ProcessSet& create_global_set(EngineParts& rank) {
  rank.registry.create_global({});
  return rank.registry.global();
}

// A rank with the deadlines of its transfers, on which an allreduce 'x' of all ranks has begun.
struct RunningBatch {
  explicit RunningBatch(const std::vector<std::unique_ptr<EngineParts>>& ranks)
      : rank(*ranks[0]),
        set(create_global_set(rank)),
        deadlines(rank.config, rank.mesh, rank.registry, rank.point_to_point, rank.gpu,
                  rank.suspicion) {
    deadlines.check_transfers(at(100));
    CHECK(set.last_progress() == at(100));  // nothing runs
    Batch batch;
    batch.number = 1;
    batch.operations = {operation_of({.name = "x", .shape = {1}, .input = &value, .output = &value},
                                     set.members())};
    set.enqueue(std::move(batch), at(100));
    CHECK(!set.poll());
    CHECK(set.executor().running() != nullptr);
    pump(ranks);
  }
  EngineParts& rank;
  ProcessSet& set;
  TransferDeadlines deadlines;
  float value = 1;
};

std::string joined(const std::vector<std::string>& lines) {
  std::string text;
  for (const auto& line : lines) text += line + "\n";
  return text;
}

}  // namespace

TEST_CASE(
    "from half of a limit on, ranks are pinged once, and those that do not answer are named") {
  Suspicion suspicion(0, 4);
  const std::vector<int> all{0, 1, 2, 3};
  suspicion.receive_pong(1);  // to no ping
  CHECK(suspicion.examine(all, 7s, 16s, at(97)).silent.empty());
  CHECK(suspicion.take_pings().empty());
  suspicion.examine(all, 10s, 16s, at(100));
  suspicion.examine(all, 13s, 16s, at(103));
  CHECK(suspicion.take_pings() == std::vector{1, 2, 3});
  CHECK(suspicion.examine(all, 13s, 16s, at(103)).silent.empty());
  CHECK(suspicion.examine(all, 14s, 16s, at(104)).silent == std::vector{1, 2, 3});
  suspicion.receive_pong(2);
  CHECK(suspicion.take_pings().empty());
  const auto find = [&](const std::vector<int>& ranks) {
    return suspicion.examine(ranks, 16s, 16s, at(104));
  };
  CHECK(find({0, 1}).is_late);
  CHECK(find({0, 1}).describe_silent() == "rank 1, which does not answer");
  CHECK(find({0, 1}).blame({3}) == "rank 1, which does not answer");
  CHECK(mentions({HP_OK, find(all).describe_silent()}, {"1", "3", "which do not"}));
  CHECK(find({0, 2}).describe_silent().empty());
  CHECK(find({0, 2}).blame({3}) == "rank 3");
}

TEST_CASE("a rank that has answered is asked again, and may have stopped since") {
  Suspicion suspicion(0, 2);
  suspicion.examine({1}, 5s, 8s, at(100));
  suspicion.receive_pong(1);
  CHECK(suspicion.take_pings().size() == 1);
  suspicion.examine({1}, 6s, 8s, at(101));
  CHECK(suspicion.take_pings().empty());  // too soon
  CHECK(suspicion.examine({1}, 3s, 8s, at(110)).silent.empty());
  suspicion.examine({1}, 7s, 8s, at(110));
  CHECK(suspicion.take_pings().size() == 1);
  CHECK(suspicion.examine({1}, 9s, 8s, at(112)).silent == std::vector{1});
}

TEST_CASE(
    "an operation that some ranks do not submit is reported as a stall, once per check time") {
  EngineOptions options;
  options.stall_check_time = Seconds(10);
  options.deadlock_time = kForever;
  const auto ranks = make_parts(3, options);
  Inspectors job(ranks);
  job.pending(1, "x", 20);
  const RunningTime now = ranks[0]->clock.now();
  CHECK(job.inspectors[1]->interval() == Seconds(5));
  job.inspectors[1]->check(now);  // asks the root
  job.run();
  job.inspectors[0]->check(now);
  CHECK(job.inspectors[0]->running());
  job.run();
  CHECK(!job.inspectors[0]->running());
  CHECK(mentions({HP_OK, joined(ranks[0]->logged)}, {"stalled: ", "'x'", "ranks 0, 2"}));
  const std::size_t lines = ranks[0]->logged.size();
  job.inspectors[0]->receive(InspectionRequest{});
  job.inspectors[0]->check(now + 6s);
  job.run();
  CHECK(!job.inspectors[0]->running());
  CHECK(ranks[0]->logged.size() == lines);
}

TEST_CASE("an operation that has waited for too long fails the job") {
  EngineOptions options;
  options.operation_timeout = Seconds(5);
  options.deadlock_time = kForever;
  const auto ranks = make_parts(2, options);
  Inspectors job(ranks);
  job.pending(0, "x", 8);
  job.inspectors[0]->check(ranks[0]->clock.now());
  const Status status = failure_of([&] { job.run(); });
  CHECK(status.code == HP_TIMEOUT);
  CHECK(mentions(status, {"'x'", "rank 1", "giving up"}));
}

TEST_CASE("a rank that does not answer the root is named") {
  EngineOptions options;
  options.stall_check_time = Seconds(10);
  options.deadlock_time = kForever;
  options.operation_timeout = Seconds(100);
  const auto ranks = make_parts(3, options);
  Inspectors job(ranks);
  job.pending(0, "x", 20);
  StallInspector& root = *job.inspectors[0];
  const RunningTime now = ranks[0]->clock.now();
  root.check(now - 6s);
  job.run();  // All ranks have answered once, so that a silence begins with the next question.
  CHECK(!root.running());
  for (const int peer : ranks[0]->suspicion.take_pings()) ranks[0]->suspicion.receive_pong(peer);
  root.check(now);
  job.run(2);
  CHECK(root.running());
  root.check(now + 4s);
  CHECK(ranks[0]->suspicion.take_pings().empty());
  root.check(now + 6s);
  CHECK(ranks[0]->suspicion.take_pings() == std::vector{2});
  root.check(now + 11s);
  CHECK(mentions({HP_OK, joined(ranks[0]->logged)}, {"rank 2 did not answer for 11 s"}));
  const Status status = failure_of([&] { root.check(now + 101s); });
  CHECK(status.code == HP_TIMEOUT);
}

TEST_CASE("a silence begins with the wait, also if another rank waits and passes its request on") {
  EngineOptions options;
  options.data_timeout = Seconds(10);
  options.deadlock_time = kForever;
  options.stall_check_time = kForever;
  for (const double waited : {5.0, 6.5, 400.0}) {
    CAPTURE(waited);
    const auto ranks = make_parts(3, options);
    Inspectors job(ranks);
    job.pending(1, "x", waited);
    StallInspector& root = *job.inspectors[0];
    const RunningTime now = ranks[0]->clock.now();
    CHECK(root.interval() == Seconds(5));
    job.inspectors[1]->check(now);
    job.run(2);
    root.check(now);
    job.run(2);
    CHECK(root.running());
    // A rank has a quarter of the limit for its answer even if the question comes late.
    const double left = std::fmax(kSecondsToAnswer, 10 - waited);
    for (int tenths = 1; tenths < std::lround(10 * left) - 1; tenths += 2)
      root.check(now + Seconds(tenths / 10.0));
    const Status late = failure_of([&] { root.check(now + Seconds(left + 0.1)); });
    CHECK(mentions(late, {"pending for 10 s, waiting for rank 2, which does not answer"}));
  }
}

TEST_CASE("a rank that does not answer an inspection for other groups is not blamed") {
  EngineOptions options;
  options.stall_check_time = Seconds(10);
  options.operation_timeout = Seconds(100);
  const auto ranks = make_parts(2, options);
  Inspectors job(ranks);
  StallInspector& root = *job.inspectors[0];
  const RunningTime now = ranks[0]->clock.now();
  root.receive(InspectionRequest{Seconds(0), true});
  root.check(now);
  job.run(1);
  CHECK(root.running());
  CHECK_NOTHROW(root.check(now + 1000s));
  CHECK(ranks[0]->logged.empty());
  // An operation of this one waits, too: its limits count from now on.
  root.receive(InspectionRequest{});
  CHECK_NOTHROW(root.check(now + 2000s));
  CHECK_NOTHROW(root.check(now + 2005s));
  CHECK(failure_of([&] { root.check(now + 2200s); }).code == HP_TIMEOUT);
}

TEST_CASE("ranks that are blocked on each other's operations have them called off") {
  EngineOptions options;
  options.deadlock_time = Seconds(1);
  const auto ranks = make_parts(2, options);
  Inspectors job(ranks);
  std::vector<std::unique_ptr<HandleTable::Wait>> waits;
  for (int rank = 0; rank < 2; ++rank) {
    EngineParts& parts = *ranks[static_cast<std::size_t>(rank)];
    const OperationPtr operation = job.pending(rank, "x" + std::to_string(rank), 5);
    waits.push_back(std::make_unique<HandleTable::Wait>(parts.handles, operation->handle));
    parts.activity.last_event = steady_now() - 5s;
  }
  job.inspectors[0]->check(ranks[0]->clock.now());
  job.run();
  CHECK(mentions({HP_OK, joined(ranks[0]->logged)}, {"x0", "x1"}));
  const auto decisions = negotiated(ranks[0]->registry.global()).decisions;
  REQUIRE(decisions.size() == 1);
  CHECK(decisions[0].kind == DecisionItem::Kind::kFailAll);
  CHECK(decisions[0].status.code == HP_DEADLOCK);
}

namespace {

constexpr Seconds kSlice{0.1};

// Submitted by a thread of the program, not of a pool.
OperationPtr program_operation(const std::string& name) {
  OperationPtr operation = make_test_operation(name);
  operation->counts_caller = true;
  return operation;
}

// A table with one operation, which the calling thread has submitted, or a thread of a pool.
struct Submitted {
  explicit Submitted(bool by_pool_thread) {
    operation->counts_caller = !by_pool_thread;
    handles.add(operation);
  }
  auto wait(Seconds timeout) {
    return std::make_unique<HandleTable::Wait>(handles, operation->handle, timeout);
  }
  // Long after all slices that have ended.
  int busy_later() const { return handles.busy_threads(steady_now() + 60s); }

  HandleTable handles;
  const OperationPtr operation = make_test_operation("x");
};

}  // namespace

TEST_CASE("a thread that has submitted is busy while it does not wait") {
  Submitted submitted(false);
  CHECK(submitted.busy_later() == 1);
  auto wait = submitted.wait(kForever);
  CHECK(submitted.busy_later() == 0);
  submitted.handles.finish_all({&submitted.operation, 1});
  wait.reset();
  CHECK(submitted.handles.busy_threads(steady_now()) == 1);
}

TEST_CASE("a thread that waits in slices is blocked when it has said which threads it expects") {
  for (const bool by_pool_thread : {false, true}) {
    CAPTURE(by_pool_thread);
    Submitted submitted(by_pool_thread);
    submitted.wait(kSlice);
    submitted.wait(kSlice);
    CHECK(submitted.busy_later() == 1);  // it has not said which threads it expects to submit
    submitted.handles.expect_threads({});
    const SteadyTime during_the_slice = steady_now();
    auto again = submitted.wait(kSlice);
    CHECK(submitted.busy_later() == 0);
    again.reset();
    // The next slice follows soon, so the thread still counts as blocked.
    CHECK(submitted.handles.busy_threads(during_the_slice) == 0);
    CHECK(submitted.busy_later() == (by_pool_thread ? 0 : 1));
  }
}

TEST_CASE("threads of pools are not busy") {
  Submitted submitted(true);
  CHECK(submitted.busy_later() == 0);
  submitted.wait(kForever);
  CHECK(submitted.busy_later() == 0);
}

TEST_CASE("threads that a waiting thread expects to submit are busy while they run") {
  Submitted submitted(true);
  std::promise<std::int64_t> id;
  std::promise<void> end;
  std::thread other([&] {
    id.set_value(::syscall(SYS_gettid));
    end.get_future().wait();
  });
  submitted.handles.expect_threads({::syscall(SYS_gettid), id.get_future().get()});
  CHECK(submitted.busy_later() == 0);  // nobody waits
  {
    const auto wait = submitted.wait(kForever);
    CHECK(submitted.busy_later() == 1);
    end.set_value();
    other.join();
    CHECK(comes_to([&] { return submitted.busy_later() == 0; }));
  }
}

TEST_CASE("a thread that only polls an operation waits for it, and one that computes does not") {
  Submitted submitted(false);
  const auto poll = [&](const std::function<void()>& between) {
    for (const SteadyTime end = steady_now() + 500ms; steady_now() < end;) {
      CHECK(submitted.handles.poll(submitted.operation->handle).code == HP_IN_PROGRESS);
      between();
    }
  };
  const auto busy = [&] { return submitted.handles.busy_threads(steady_now(), 300ms); };
  CHECK(busy() == 1);
  poll([] { std::this_thread::sleep_for(std::chrono::milliseconds(5)); });
  CHECK(busy() == 0);
  CHECK(submitted.handles.awaited(*submitted.operation, steady_now()));
  CHECK(!submitted.handles.waited_for(*submitted.operation, steady_now()));
  CHECK(submitted.busy_later() == 1);  // it has ceased to poll
  submitted.handles.add(program_operation("y"));
  CHECK(busy() == 1);
  poll([] {
    for (const auto end = cpu_time_of(static_cast<pid_t>(::syscall(SYS_gettid))) + 20'000'000;
         cpu_time_of(static_cast<pid_t>(::syscall(SYS_gettid))) < end;) {
    }
  });
  CHECK(busy() == 1);
}

// Under an emulator, /proc has the numbers of the emulator's system calls.
#if !defined(HOROPLUG_EMULATED)
TEST_CASE("a thread that sleeps until another one wakes it may wait for a future") {
  Submitted submitted(true);
  std::mutex mutex;
  std::condition_variable ended;
  bool over = false;
  const int pipe = ::eventfd(0, EFD_CLOEXEC);
  std::vector<std::int64_t> ids(3);
  std::latch known(3);
  const auto start = [&](std::size_t index, const std::function<void()>& body) {
    return std::thread([&, index, body] {
      submitted.handles.add(program_operation("of." + std::to_string(index)));
      ids[index] = ::syscall(SYS_gettid);
      known.count_down();
      body();
    });
  };
  std::thread waits = start(0, [&] {
    std::unique_lock lock(mutex);
    ended.wait(lock, [&] { return over; });
  });
  std::thread waits_for_a_time = start(1, [&] {
    std::unique_lock lock(mutex);
    ended.wait_for(lock, std::chrono::minutes(1), [&] { return over; });
  });
  std::thread reads = start(2, [&] {
    eventfd_t value = 0;
    ::eventfd_read(pipe, &value);
  });
  known.wait();
  CHECK(submitted.handles.busy_threads(steady_now(), 200ms) == 3);
  const auto note = [&] { submitted.handles.note_wait(submitted.operation->handle, ids); };
  const auto blocked = [&] {
    // A process that looks all the time computes, and so none of its threads may count as blocked.
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    note();
    return 3 - submitted.handles.busy_threads(steady_now(), 200ms);
  };
  CHECK(comes_to([&] { return blocked() == 1; }));
  CHECK(submitted.handles.awaited(*submitted.operation, steady_now()));
  CHECK(submitted.handles.busy_threads(steady_now() + 60s, 200ms) == 3);
  {
    std::lock_guard lock(mutex);
    over = true;
  }
  ended.notify_all();
  ::eventfd_write(pipe, 1);
  for (std::thread* thread : {&waits, &waits_for_a_time, &reads}) thread->join();
  ::close(pipe);
}
#endif

TEST_CASE("threads that a waiting thread holds up are blocked with it") {
  Submitted submitted(true);
  std::promise<std::int64_t> id;
  std::promise<void> end;
  std::thread other([&] {
    submitted.handles.add(program_operation("other"));
    id.set_value(::syscall(SYS_gettid));
    end.get_future().wait();
  });
  const std::int64_t held = id.get_future().get();
  submitted.handles.hold_threads({held});
  CHECK(submitted.busy_later() == 1);
  {
    const auto wait = submitted.wait(kForever);
    CHECK(submitted.busy_later() == 0);
  }
  CHECK(submitted.busy_later() == 1);
  end.set_value();
  other.join();
}

TEST_CASE("threads that have ended are forgotten") {
  CallerThreads threads;
  for (int i = 0; i < 1000; ++i) std::thread([&] { threads.note_submission(); }).join();
  CHECK(threads.size() < 100);
  threads.note_submission();
  CHECK(comes_to([&] { return threads.busy(steady_now()) == 1; }));
}

TEST_CASE("a batch without progress fails with its name and the ranks it waits for") {
  EngineOptions options;
  options.data_timeout = Seconds(10);
  const auto ranks = make_parts(2, options);
  RunningBatch running(ranks);
  auto& [rank, set, deadlines, value] = running;
  deadlines.check_transfers(at(104));
  CHECK(set.last_progress() == at(104));  // its data has left
  deadlines.check_transfers(at(108));
  CHECK(rank.suspicion.take_pings().empty());
  deadlines.check_transfers(at(109));  // half of the time has passed
  CHECK(rank.suspicion.take_pings() == std::vector{1});
  rank.suspicion.receive_pong(1);
  deadlines.check_transfers(at(112));
  const Status late = failure_of([&] { deadlines.check_transfers(at(114)); });
  CHECK(late.code == HP_TIMEOUT);
  CHECK(mentions(late, {"allreduce 'x'", "no progress for 10 s", "waiting for rank 1"}));
  CHECK(mentions(failure_of([&] { deadlines.check_transfers(at(115)); }),
                 {"rank 1, which does not answer"}));
}

TEST_CASE(
    "a rank without a connection to this one is not pinged, and others have time to report it") {
  EngineOptions options;
  options.data_timeout = Seconds(10);
  const auto ranks = make_parts(3, options, {{0, 2}});
  RunningBatch running(ranks);
  auto& [rank, set, deadlines, value] = running;
  REQUIRE(set.executor().blame() == std::vector{1});
  deadlines.check_transfers(at(101));
  deadlines.check_transfers(at(107));
  CHECK(rank.suspicion.take_pings() == std::vector{1});
  CHECK(rank.mesh.take_needed().empty());
  rank.suspicion.receive_pong(1);
  // The limit was at 110. A rank that waits for rank 2 itself has reached it, too.
  deadlines.check_transfers(at(112));
  const Status late = failure_of([&] { deadlines.check_transfers(at(113)); });
  CHECK(mentions(late, {"no progress for 10 s", "waiting for rank 1"}));
}

TEST_CASE("data of other sets counts only over the links to the ranks that a batch waits for") {
  EngineOptions options;
  options.data_timeout = Seconds(10);
  const auto ranks = make_parts(3, options);
  RunningBatch running(ranks);
  auto& [rank, set, deadlines, value] = running;
  deadlines.check_transfers(at(101));
  const std::vector<int> waits_for = set.executor().blame();
  REQUIRE(waits_for.size() == 1);
  const int other = 3 - waits_for.front();
  // The frames of another set.
  const auto move_data = [&](int peer) {
    rank.mesh.link(peer)->send({.set = 7, .batch = 1, .check = 1}, &value, sizeof value);
    pump(ranks);
  };
  move_data(waits_for.front());
  deadlines.check_transfers(at(105));
  CHECK(set.last_progress() == at(105));
  move_data(other);
  deadlines.check_transfers(at(108));
  CHECK(set.last_progress() == at(105));
  move_data(other);
  CHECK(failure_of([&] { deadlines.check_transfers(at(116)); }).code == HP_TIMEOUT);
}

TEST_CASE("after a rank has left, a recv has limits without an inspection of all ranks") {
  EngineOptions options;
  options.data_timeout = Seconds(10);
  options.operation_timeout = Seconds(100);
  const auto ranks = make_parts(4, options);
  EngineParts& rank = *ranks[0];
  const Inspectors job(ranks);
  StallInspector& inspector = *job.inspectors[0];
  rank.peers.receive_bye(3);
  const auto post = [&](int source) {
    OperationPtr operation = make_test_operation("recv.noname.1", 4, OpKind::kReceive);
    operation->handle = 1 + source;
    change_signature(*operation, [&](Signature& signature) {
      signature.root = source;
      signature.shapes = {{1}};
    });
    operation->tag = 7;
    operation->pending_since = at(1000);
    rank.point_to_point.submit(operation);
  };
  post(1);
  const auto pinged = [&] { return rank.suspicion.take_pings(); };
  inspector.check(at(1004));
  CHECK(pinged().empty());
  inspector.check(at(1006));
  CHECK(pinged() == std::vector{1});
  CHECK(mentions(failure_of([&] { inspector.check(at(1010)); }),
                 {"recv.noname.1 from rank 1, tag 7", "waiting for rank 1, which does not answer",
                  "HOROVOD_GLOO_TIMEOUT_SECONDS"}));
  rank.suspicion.receive_pong(1);
  inspector.check(at(1010));  // it may take any time to send
  rank.suspicion.receive_pong(1);
  inspector.check(at(1099));
  rank.suspicion.receive_pong(1);
  CHECK(mentions(failure_of([&] { inspector.check(at(1100)); }),
                 {"waiting for rank 1 for 100 s", "HOROPLUG_OPERATION_TIMEOUT_SECONDS"}));
  rank.point_to_point.take_all();

  rank.suspicion.receive_pong(1);
  post(HP_ANY_RANK);
  pinged();
  inspector.check(at(1006));
  CHECK(pinged() == std::vector{2});  // rank 3 has left
  rank.suspicion.receive_pong(1);
  rank.suspicion.receive_pong(2);
  CHECK(mentions(failure_of([&] { inspector.check(at(1100)); }), {"from any rank", "ranks 1, 2"}));
}

namespace {

// Delivers the messages between the ranks' negotiators, and runs the batches, until all is done.
void negotiate(const std::vector<std::unique_ptr<EngineParts>>& ranks) {
  for (bool moved = true; moved;) {
    moved = false;
    for (const auto& from : ranks) {
      ProcessSet& set = from->registry.global();
      auto [messages, decisions, trials] = negotiated(set);
      for (const auto& outgoing : messages) {
        Reader reader(outgoing.message);
        const MessageKind kind = read_head(reader).kind;
        const auto to = static_cast<std::size_t>(outgoing.to);
        ranks[to]->registry.global().receive(from->config.rank, kind, reader);
      }
      for (auto& decision : decisions) set.apply(decision, at(0), [](Batch&) {});
      while (const auto done = set.poll()) set.batch_done(*done, at(0));
      moved |= !messages.empty() || set.busy();
    }
    pump(ranks);
  }
}

}  // namespace

TEST_CASE("a plan does not end while what a waiting caller has submitted is in the queue") {
  const auto ranks = make_parts(2);
  for (const auto& rank : ranks) rank->registry.create_global({});
  float value = 1;
  const auto make = [&](EngineParts& rank, const std::string& name) {
    return operation_of({.name = name, .shape = {1}, .input = &value, .output = &value},
                        rank.registry.global().members());
  };
  const auto submit = [&](EngineParts& rank, const std::string& name) {
    CHECK(rank.registry.global().accept(make(rank, name), at(0)).ok());
  };
  // Both ranks repeat a step with two operations until it is a plan.
  for (int step = 0; step < 6; ++step) {
    for (const auto& rank : ranks) {
      submit(*rank, "a");
      submit(*rank, "b");
    }
    negotiate(ranks);
  }
  EngineParts& rank = *ranks[1];
  ProcessSet& set = rank.registry.global();
  REQUIRE(set.negotiator().has_plan());
  PlanDeadlines plans(rank.config.options, rank.registry, rank.handles, rank.submissions);
  const auto asks_for_the_end = [&](RunningTime now) {
    plans.check(now);
    return !negotiated(set).messages.empty();
  };

  const OperationPtr a = make(rank, "a");
  REQUIRE(rank.submissions.submit(std::vector{a}).ok());
  REQUIRE(take_requests(rank.submissions)->operations.size() == 1);
  CHECK(set.accept(a, at(100)).ok());
  REQUIRE(set.negotiator().held_up());
  CHECK(plans.patience(set, steady_at(100)) == Seconds(0.1));
  // The program has computed for a while, submits the other operation, and waits.
  REQUIRE(rank.submissions.submit(std::vector{make_test_operation("b")}).ok());
  HandleTable::Wait wait(rank.handles, a->handle);
  CHECK(!asks_for_the_end(at(101)));
  CHECK(plans.patience(set, steady_at(101)) == kForever);
  // The engine has taken it, and the plan still lacks an operation: the caller waits in vain.
  REQUIRE(take_requests(rank.submissions)->operations.size() == 1);
  CHECK(plans.patience(set, steady_at(101)) == Seconds(0.002));
  CHECK(!asks_for_the_end(at(100.001)));
  CHECK(asks_for_the_end(at(101)));
}

TEST_CASE("the watchdog does not hold it against the peers that this process stood still") {
  EngineOptions options;
  options.data_timeout = Seconds(10);
  const auto ranks = make_parts(2, options);
  EngineParts& rank = *ranks[0];
  Polling polling(rank.lifecycle, rank.registry, rank.point_to_point, rank.mesh, rank.activity);
  const auto read = [&](double now) { return rank.clock.at(steady_at(now)); };
  Handshake handshake(rank.config, rank.mesh, *rank.doorbell, [](const auto&) {}, read(100));
  TransferDeadlines transfers(rank.config, rank.mesh, rank.registry, rank.point_to_point, rank.gpu,
                              rank.suspicion);
  StallInspector stalls(rank.config, rank.mesh, rank.registry, rank.point_to_point, rank.handles,
                        rank.suspicion, rank.peers, rank.activity, rank.clock);
  PlanDeadlines plans(rank.config.options, rank.registry, rank.handles, rank.submissions);
  PeerWakeUps wakeups(rank.mesh, rank.registry, rank.point_to_point, polling, 0);
  Watchdog watchdog(rank.config, rank.lifecycle, rank.mesh, rank.clock, handshake, transfers,
                    stalls, rank.suspicion, wakeups, plans);
  watchdog.watch(read(150));  // it was stopped for 50 seconds
  for (int half = 301; half < 320; ++half) watchdog.watch(read(half / 2.0));
  CHECK(failure_of([&] {
          for (int half = 320; half < 324; ++half) watchdog.watch(read(half / 2.0));
        }).code == HP_TIMEOUT);
  CHECK(watchdog.interval() > 0s);
  CHECK(watchdog.interval() <= 250ms);
}

TEST_CASE("polling becomes rarer with the length of a wait, within limits") {
  const auto ranks = make_parts(2);
  EngineParts& rank = *ranks[0];
  Polling polling(rank.lifecycle, rank.registry, rank.point_to_point, rank.mesh, rank.activity);
  rank.activity.quiet_since = steady_at(100);
  CHECK(polling.interval(steady_at(100)) == 20us);
  CHECK(polling.interval(steady_at(100.016)).count() == doctest::Approx(1e-3));
  CHECK(polling.interval(steady_at(200)) == 5ms);
  CHECK(!polling.needed());
}
