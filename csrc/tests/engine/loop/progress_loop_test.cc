// Tests of callers that run the progress loop while they wait: several threads, waits in slices,
// concurrent submissions, and the end of the engine during a wait.
#include "engine/loop/progress_loop.h"

#include <doctest/doctest.h>
#include <poll.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "engine/loop/spin_budget.h"
#include "harness/cluster.h"
#include "harness/engine_parts.h"
#include "transport/doorbell.h"

using namespace horoplug;
using namespace horoplug::testing;

namespace {

// An allreduce in place of `count` float32 ones.
struct Ones {
  explicit Ones(std::size_t count) : data(count, 1.0F) {}
  OperationPtr operation(Engine& engine, const std::string& name) {
    return operation_of({.name = name,
                         .shape = {static_cast<std::int64_t>(data.size())},
                         .input = data.data(),
                         .output = data.data()},
                        engine.members(0));
  }
  void check(const Engine& engine) const {
    for (const float value : data) {
      if (value != static_cast<float>(engine.size())) throw std::runtime_error("wrong sum");
    }
  }
  std::vector<float> data;
};

// Waits in slices of random length until the operation is done.
void await_in_slices(Engine& engine, hp_handle handle, std::mt19937_64& random) {
  for (int slices = 0; slices < 1000000; ++slices) {
    const Seconds slice(std::ldexp(1e-6, static_cast<int>(random() % 14)));
    const Status status = engine.wait(handle, slice);
    if (status.code == HP_IN_PROGRESS) continue;
    engine.handles().release(handle);
    if (!status.ok()) throw Error(status.code, status.message);
    return;
  }
  throw std::runtime_error("never done");
}

// perform(), after which the operation has its handle.
Status perform_and_keep(Engine& engine, const OperationPtr& operation, Seconds timeout) {
  const Status status = engine.perform(operation, timeout);
  engine.handles().keep(operation);
  return status;
}

void perform_once(Engine& engine, const std::string& name, std::size_t count) {
  Ones ones(count);
  const OperationPtr operation = ones.operation(engine, name);
  const Status status = engine.perform(operation, Seconds(60));
  if (!status.ok()) throw Error(status.code, status.message);
  ones.check(engine);
}

// Runs body(thread) on several threads and rethrows the first failure.
void in_threads(int count, const std::function<void(int thread)>& body) {
  std::vector<std::exception_ptr> failures(static_cast<std::size_t>(count));
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) {
    threads.emplace_back([&, i] {
      try {
        body(i);
      } catch (...) {
        failures[static_cast<std::size_t>(i)] = std::current_exception();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

}  // namespace

TEST_CASE("threads of a rank wait, run the loop in turn, and submit in different orders") {
  for (const Transport transport : kTransports) {
    for (const int ranks : {2, 3, 8}) {
      CAPTURE(transport_name(transport));
      Cluster cluster(transport, ranks);
      const int rounds = ranks == 8 ? 15 : 40;
      cluster.run([&](int rank) {
        Engine& engine = cluster.engine(rank);
        in_threads(4, [&](int thread) {
          std::mt19937_64 random(test_seed() + static_cast<std::uint64_t>(100 * rank + thread));
          const std::string name = "t" + std::to_string(thread) + ".";
          for (int round = 0; round < rounds; ++round) {
            // Each rank chooses randomly how it waits.
            if (random() % 3 == 0) {
              perform_once(engine, name + std::to_string(round) + ".0", 10);
              perform_once(engine, name + std::to_string(round) + ".1", 5000);
              continue;
            }
            std::vector<Ones> ones{Ones(10), Ones(5000)};
            std::vector<hp_handle> handles;
            for (std::size_t i = 0; i < 2; ++i) {
              const std::string full = name + std::to_string(round) + "." + std::to_string(i);
              handles.push_back(engine.submit(ones[i].operation(engine, full)));
            }
            if (random() % 2 == 0) std::swap(handles[0], handles[1]);
            for (const hp_handle handle : handles) await_in_slices(engine, handle, random);
            for (const Ones& tensor : ones) tensor.check(engine);
          }
        });
      });
    }
  }
}

TEST_CASE("the progress thread finishes operations after their caller stops waiting") {
  for (const Transport transport : kTransports) {
    CAPTURE(transport_name(transport));
    Cluster cluster(transport, 2);
    cluster.run([&](int rank) {
      Engine& engine = cluster.engine(rank);
      for (int round = 0; round < 50; ++round) {
        // Rank 0 runs the loop for a moment and then only polls.
        Ones later(1000);
        const std::string name = "later." + std::to_string(round);
        const OperationPtr operation = later.operation(engine, name);
        Status status = perform_and_keep(engine, operation, Seconds(rank == 0 ? 20e-6 : 60));
        for (int i = 0; status.code == HP_IN_PROGRESS && i < 60000000; ++i) {
          std::this_thread::yield();
          status = engine.handles().poll(operation->handle);
        }
        CHECK(status.ok());
        engine.handles().release(operation->handle);
        later.check(engine);
      }
    });
  }
}

TEST_CASE("a progress thread that sleeps in an operation is woken when the peers begin it") {
  constexpr int kRounds = 100;
  Cluster cluster(Transport::kShm, 2);
  std::atomic<int> begun{0};
  std::atomic<std::int64_t> late_at{0};  // when rank 1 submitted; steady clock, in ns
  double waited = 0;                     // seconds of rank 0 after that
  const auto now = [] { return std::chrono::steady_clock::now().time_since_epoch(); };
  cluster.run([&](int rank) {
    Engine& engine = cluster.engine(rank);
    for (int round = 0; round < kRounds; ++round) {
      // Rank 1 submits late, so that rank 0 falls asleep in its batch once the plan is installed.
      while (rank == 1 && begun.load() <= round) std::this_thread::yield();
      // It does so after 0.5 ms without an event. (On a busy machine it may be awake yet, and is
      // not tested in this round.)
      const auto asleep = now() + std::chrono::milliseconds(2);
      while (rank == 1 && now() < asleep) std::this_thread::yield();
      Ones ones(100'000);
      const OperationPtr operation = ones.operation(engine, "late");
      if (rank == 1) late_at.store(std::chrono::nanoseconds(now()).count());
      const hp_handle handle = engine.submit(operation);
      if (rank == 0) begun.store(round + 1);
      Status status{HP_IN_PROGRESS, ""};
      for (int i = 0; status.code == HP_IN_PROGRESS && i < 60000000; ++i) {
        std::this_thread::yield();
        status = engine.poll(handle);
      }
      CHECK(status.ok());
      const auto late = std::chrono::nanoseconds(late_at.load());
      if (rank == 0) waited += std::chrono::duration<double>(now() - late).count();
      engine.handles().release(handle);
      ones.check(engine);
    }
  });
  // Without the wake-up, the thread would check its work only four times per second. What rank 1
  // spends before it submits does not count: on a busy machine it takes longer than all the rest.
  CHECK(waited < kRounds / 8);
  CHECK(cluster.engine(0).stats().planned_batches > kRounds / 2);
}

TEST_CASE("a caller whose operation is rejected releases the loop to the progress thread") {
  Cluster cluster(Transport::kThreads, 2);
  Ones first(4);
  const hp_handle handle = cluster.engine(0).submit(first.operation(cluster.engine(0), "twice"));
  Ones second(4);
  const OperationPtr refused = second.operation(cluster.engine(0), "twice");
  CHECK(failure_of([&] { cluster.engine(0).perform(refused, Seconds(60)); }).code ==
        HP_DUPLICATE_NAME);
  CHECK(refused->handle == 0);
  perform_once(cluster.engine(1), "twice", 4);
  await(cluster.engine(0), handle);
}

TEST_CASE("shutdown and abort end the waits of callers that run the loop, on all ranks") {
  for (const Transport transport : kTransports) {
    for (const bool aborts : {false, true}) {
      CAPTURE(transport_name(transport));
      Cluster cluster(transport, 3);
      std::atomic<int> waiting{0};
      std::vector<Status> failures(3);
      std::thread ender([&] {
        while (waiting < 2) std::this_thread::yield();
        if (aborts) {
          cluster.engine(0).abort("enough");
        } else {
          cluster.engine(0).shutdown();
        }
      });
      cluster.run([&](int rank) {
        if (rank == 2) return;  // the others wait for it
        Ones ones(10);
        const OperationPtr operation = ones.operation(cluster.engine(rank), "never");
        ++waiting;
        failures[static_cast<std::size_t>(rank)] = failure_of([&] {
          const Status status = cluster.engine(rank).perform(operation, Seconds(60));
          throw Error(status.code, status.message);
        });
      });
      ender.join();
      for (const int rank : {0, 1}) {
        const Status& status = failures[static_cast<std::size_t>(rank)];
        CHECK(status.code == (aborts ? HP_ABORTED : HP_SHUT_DOWN));
      }
      CHECK(failure_of([&] { perform_once(cluster.engine(1), "later", 4); }).code != HP_OK);
    }
  }
}

TEST_CASE("callers in a deadlock get an error while they run the loop") {
  EngineOptions options = test_options();
  options.deadlock_time = Seconds(0.3);
  for (const Transport transport : {Transport::kShm, Transport::kTcp}) {
    Cluster cluster(transport, 2, options);
    cluster.run([&](int rank) {
      const Status status =
          failure_of([&] { perform_once(cluster.engine(rank), "x" + std::to_string(rank), 4); });
      CHECK(status.code == HP_DEADLOCK);
    });
    cluster.run([&](int rank) { perform_once(cluster.engine(rank), "x", 4); });
  }
}

TEST_CASE("a long wait sleeps, and an idle job does not wake up") {
  // All jobs at the same time, since they do little but wait.
  std::vector<std::thread> jobs;
  for (const Transport transport : kTransports) {
    jobs.emplace_back([transport] {
      CAPTURE(transport_name(transport));
      Cluster cluster(transport, 2);
      cluster.run([&](int rank) { perform_once(cluster.engine(rank), "before", 4); });
      // Rank 0 waits in slices, as Python does.
      const std::uint64_t before = cluster.engine(0).stats().wakeups;
      Ones ones(4);
      const OperationPtr operation = ones.operation(cluster.engine(0), "late");
      CHECK(perform_and_keep(cluster.engine(0), operation, Seconds(0.05)).code == HP_IN_PROGRESS);
      for (int i = 0; i < 9; ++i) {
        CHECK(cluster.engine(0).wait(operation->handle, Seconds(0.05)).code == HP_IN_PROGRESS);
      }
      CHECK(cluster.engine(0).stats().wakeups - before < 60);
      perform_once(cluster.engine(1), "late", 4);
      await(cluster.engine(0), operation->handle);
      // The progress thread may check its deadlines once more before it sleeps without a time
      // limit.
      const std::uint64_t after = cluster.engine(0).stats().wakeups;
      std::this_thread::sleep_for(std::chrono::milliseconds(600));
      const std::uint64_t rest = cluster.engine(0).stats().wakeups;
      CHECK(rest - after <= 4);
      std::this_thread::sleep_for(std::chrono::milliseconds(600));
      CHECK(cluster.engine(0).stats().wakeups == rest);
    });
  }
  for (std::thread& job : jobs) job.join();
}

namespace {

// Simulates a wait for an event that arrives after `arrives` seconds; waking a sleeping thread
// takes `wakes` seconds more. Returns the time spent spinning.
double wait_once(SpinBudget& budget, double arrives, double wakes) {
  constexpr double kLook = 1e-6;
  double time = 0;
  while (time < arrives && budget.spin(steady_at(time))) time += kLook;
  budget.found(steady_at(time < arrives ? arrives + wakes : time));
  return time;
}

}  // namespace

TEST_CASE("a doorbell wakes a sleeping owner, and a resting owner only by ring()") {
  Doorbell bell;
  const auto heard = [&] {
    pollfd entry{bell.fd(), POLLIN, 0};
    const bool rung = ::poll(&entry, 1, 0) == 1;
    bell.silence();
    return rung;
  };
  const auto ring = [&] {
    bell.ring();
    return heard();
  };
  const auto ring_unless_resting = [&] {
    bell.ring_unless_resting();
    return heard();
  };
  CHECK(!ring());
  CHECK(!ring_unless_resting());
  bell.prepare_sleep();
  CHECK(ring());
  CHECK(!ring());  // the owner is awake now
  bell.prepare_sleep();
  CHECK(ring_unless_resting());
  CHECK(!ring_unless_resting());
  bell.prepare_sleep();
  bell.rest();
  CHECK(!ring_unless_resting());
  CHECK(ring());
  CHECK(!ring());
  bell.prepare_sleep();
  bell.rest();
  bell.finish_sleep();
  CHECK(!ring());
}

TEST_CASE("the owner of a doorbell learns on which processor the thread runs that has rung") {
  Doorbell bell;
  CHECK(bell.finish_sleep() == -1);
  bell.prepare_sleep();
  CHECK(bell.finish_sleep() == -1);
  cpu_set_t allowed;
  REQUIRE(::sched_getaffinity(0, sizeof allowed, &allowed) == 0);
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(static_cast<std::size_t>(cpu), &allowed)) continue;
    bell.prepare_sleep();
    std::thread([&] {
      cpu_set_t only;
      CPU_ZERO(&only);
      CPU_SET(static_cast<std::size_t>(cpu), &only);
      REQUIRE(::sched_setaffinity(0, sizeof only, &only) == 0);
      bell.ring();
    }).join();
    CHECK(bell.finish_sleep() == cpu);
    CHECK(bell.finish_sleep() == -1);
  }
}

TEST_CASE("a thread moves after several wake-ups from its own processor, and not too often") {
  SharedProcessor shared;
  SteadyTime now = steady_now();
  // Wake-ups until it moves, at most so many.
  const auto moves_within = [&](int most, int ringer) {
    for (int i = 1; i <= most; ++i) {
      now += Seconds(10e-6);
      if (shared.woken(ringer, 1, now)) return i;
    }
    return 0;
  };
  CHECK(moves_within(1000, 0) == 0);
  CHECK(moves_within(1000, -1) == 0);
  CHECK(moves_within(1000, 1) == SharedProcessor::kInARow);
  // The move has helped for a while, so that the next one may come soon.
  now += SharedProcessor::kLeastPause;
  CHECK(moves_within(1000, 1) == SharedProcessor::kInARow);
  // After wake-ups from elsewhere the count begins anew.
  now += SharedProcessor::kLeastPause;
  CHECK(moves_within(SharedProcessor::kInARow - 1, 1) == 0);
  CHECK(moves_within(1, 0) == 0);
  CHECK(moves_within(SharedProcessor::kInARow - 1, 1) == 0);
  CHECK(moves_within(1, 1) == 1);
  // Moves that do not help become rare.
  SteadyTime last = now;
  Seconds pause{};
  for (int i = 0; i < 15; ++i) {
    do {
      now += Seconds(100e-6);
    } while (!shared.woken(1, 1, now));
    CHECK(now - last >= pause);
    CHECK(now - last <= SharedProcessor::kMostPause + Seconds(0.1));
    pause = now - last;
    last = now;
  }
  CHECK(pause > Seconds(5));
}

TEST_CASE("a thread that leaves a processor may run on the same processors as before") {
  cpu_set_t before, after;
  REQUIRE(::sched_getaffinity(0, sizeof before, &before) == 0);
  const int from = ::sched_getcpu();
  leave_processor(from);
  REQUIRE(::sched_getaffinity(0, sizeof after, &after) == 0);
  CHECK(CPU_EQUAL(&before, &after));
  leave_processor(-1);

  // Where there is only one processor, nothing changes.
  std::thread([&] {
    cpu_set_t only;
    CPU_ZERO(&only);
    CPU_SET(static_cast<std::size_t>(from), &only);
    REQUIRE(::sched_setaffinity(0, sizeof only, &only) == 0);
    leave_processor(from);
    REQUIRE(::sched_getaffinity(0, sizeof after, &after) == 0);
    CHECK(CPU_EQUAL(&only, &after));
    CHECK(::sched_getcpu() == from);
  }).join();
}

TEST_CASE("a rank that is elsewhere for many operations in quick succession goes home") {
  HomeProcessor home(0);
  SteadyTime now = steady_now();
  // Operations until it goes home, at most so many, of this duration.
  const auto goes_within = [&](int most, int here, Seconds each) {
    for (int i = 1; i <= most; ++i) {
      now += each;
      if (home.ended(here, now)) return i;
    }
    return 0;
  };
  constexpr Seconds kQuick{10e-6};
  CHECK(goes_within(1000, 0, kQuick) == 0);
  CHECK(goes_within(1000, 1, Seconds(1e-3)) == 0);  // it does not only wait
  CHECK(goes_within(HomeProcessor::kInARow - 1, 1, kQuick) == 0);
  CHECK(goes_within(1, 0, kQuick) == 0);  // it was at home meanwhile
  CHECK(goes_within(1000, 1, kQuick) == HomeProcessor::kInARow);
  // A move that lasts is followed by another one when it is needed.
  now += HomeProcessor::kLasts + HomeProcessor::kLeastPause;
  CHECK(goes_within(1000, 1, kQuick) == HomeProcessor::kInARow);
  // Moves that do not last become rare.
  SteadyTime last = now;
  Seconds pause{};
  for (int i = 0; i < 15; ++i) {
    while (!home.ended(1, now)) now += kQuick;
    CHECK(now - last >= std::min(pause, HomeProcessor::kMostPause));
    CHECK(now - last <= HomeProcessor::kMostPause + Seconds(0.1));
    pause = now - last;
    last = now;
  }
  CHECK(pause > Seconds(5));

  HomeProcessor none;
  for (int i = 0; i < 1000; ++i) CHECK_FALSE(none.ended(1, now += kQuick));
}

TEST_CASE("ranks have homes that are distributed evenly over the processors") {
  cpu_set_t allowed;
  REQUIRE(::sched_getaffinity(0, sizeof allowed, &allowed) == 0);
  const int processors = CPU_COUNT(&allowed);
  CHECK(home_of(0, processors * HomeProcessor::kMostRanks + 1) == -1);
  if (processors == ::sysconf(_SC_NPROCESSORS_ONLN)) {
    std::vector<int> ranks(CPU_SETSIZE);
    for (int place = 0; place < 2 * processors; ++place) {
      const int home = home_of(place, 2 * processors);
      REQUIRE(home >= 0);
      CHECK(CPU_ISSET(static_cast<std::size_t>(home), &allowed));
      CHECK(++ranks[static_cast<std::size_t>(home)] <= 2);
    }
  }
  // A thread that is restricted to some of the processors has no home, and keeps its restriction.
  std::thread([&] {
    const int home = home_of(processors - 1, processors);
    go_to_processor(home);
    cpu_set_t after;
    REQUIRE(::sched_getaffinity(0, sizeof after, &after) == 0);
    CHECK(CPU_EQUAL(&allowed, &after));
    go_to_processor(-1);
    if (processors == 1) return;
    const int here = ::sched_getcpu();
    cpu_set_t only;
    CPU_ZERO(&only);
    CPU_SET(static_cast<std::size_t>(here), &only);
    REQUIRE(::sched_setaffinity(0, sizeof only, &only) == 0);
    CHECK(home_of(0, processors) == -1);
    for (int processor = 0; processor < CPU_SETSIZE; ++processor) go_to_processor(processor);
    REQUIRE(::sched_getaffinity(0, sizeof after, &after) == 0);
    CHECK(CPU_EQUAL(&only, &after));
    CHECK(::sched_getcpu() == here);
  }).join();
}

TEST_CASE("a thread that yields may wait longer than one that spins") {
  SpinBudget spins, yields(SpinBudget::kMostYielding);
  constexpr double kWait = 500e-6;
  CHECK(wait_once(spins, kWait, 0) < kWait);
  CHECK(wait_once(yields, kWait, 0) >= kWait);
  // It learns as well that waiting does not pay.
  for (int i = 0; i < 12; ++i) wait_once(yields, 1.0, 0);
  CHECK(wait_once(yields, 1.0, 0) < SpinBudget::kTry.count());
}

TEST_CASE("a renewed spin budget does not remember that spinning has not paid") {
  SpinBudget budget;
  for (int i = 0; i < 10; ++i) wait_once(budget, 1.0, 0);
  CHECK(wait_once(budget, 1.0, 0) < SpinBudget::kTry.count());
  budget.renew();
  CHECK(wait_once(budget, 1.0, 0) >= SpinBudget::kMost.count());
}

TEST_CASE("the spin budget follows whether spinning pays") {
  SpinBudget budget;
  CHECK(wait_once(budget, 1.0, 0) ==
        doctest::Approx(SpinBudget::kMost.count()).epsilon(0.02).scale(0));
  for (int i = 0; i < 10; ++i) wait_once(budget, 1.0, 0);
  double total = 0;
  for (int i = 0; i < 160; ++i) total += wait_once(budget, 1.0, 0);
  CHECK(total == doctest::Approx(10 * SpinBudget::kTry.count()).epsilon(0.1).scale(0));
  for (int i = 0; i < 10 * SpinBudget::kRests; ++i) wait_once(budget, 10e-6, 0);
  CHECK(wait_once(budget, 1.0, 0) ==
        doctest::Approx(SpinBudget::kMost.count()).epsilon(0.02).scale(0));
  // A budget that was reduced grows again.
  SpinBudget cut;
  for (int i = 0; i < 3; ++i) wait_once(cut, 1.0, 0);
  for (int i = 0; i < 5; ++i) wait_once(cut, 10e-6, 0);
  CHECK(wait_once(cut, 1.0, 0) ==
        doctest::Approx(SpinBudget::kMost.count()).epsilon(0.02).scale(0));
}

TEST_CASE("ranks that all sleep start to spin again") {
  // Events are delayed by the wake-ups of the peers, for longer than the first try to spin; with
  // some hypervisors, also for longer than the largest budget.
  for (const double delay : {90e-6, 250e-6}) {
    CAPTURE(delay);
    SpinBudget budget;
    for (int i = 0; i < 10; ++i) wait_once(budget, 1.0, 0);
    int tries = 0;  // that have lasted long enough
    for (int i = 0; i < 10 * SpinBudget::kRests; ++i) {
      tries += wait_once(budget, delay, delay / 3) >= delay - 1e-6;
    }
    CHECK(tries > 0);
  }
  // Once the peers spin, too, events come soon enough for the usual budget.
  SpinBudget budget;
  for (int i = 0; i < 10; ++i) wait_once(budget, 1.0, 0);
  int asleep = 0;
  for (int i = 0; i < 10 * SpinBudget::kRests; ++i)
    asleep += wait_once(budget, 90e-6, 30e-6) < 89e-6;
  CHECK(asleep <= 3 * SpinBudget::kRests);
}

TEST_CASE("two ranks that sleep in each exchange start to spin, also if a wake-up takes 400 us") {
  std::mt19937_64 random(test_seed());
  std::lognormal_distribution<double> noise(0, 0.1);
  for (const double wakes : {30e-6, 150e-6, 300e-6, 400e-6}) {
    for (const double works : {20e-6, 150e-6}) {
      CAPTURE(wakes);
      CAPTURE(works);
      SpinBudget budgets[2];
      for (SpinBudget& budget : budgets) {
        for (int i = 0; i < 10; ++i) wait_once(budget, 1.0, 0);  // it sleeps at once now
      }
      constexpr int kExchanges = 1000;
      int sleeps = 0;  // in the last half
      double times[2] = {};
      for (int i = 0; i < kExchanges; ++i) {
        for (double& time : times) time += works * noise(random);
        const double signals[2] = {times[0], times[1]};
        for (int rank = 0; rank < 2; ++rank) {
          const double arrives = signals[1 - rank] - times[rank];
          if (arrives <= 0) continue;
          const bool slept = wait_once(budgets[rank], arrives, wakes) < arrives;
          times[rank] += arrives + (slept ? wakes : 0);
          sleeps += slept && i >= kExchanges / 2 ? 1 : 0;
        }
      }
      CHECK(sleeps < kExchanges / 20);
    }
  }
}

TEST_CASE("the spin budget stays small if events always arrive after the spinning ends") {
  SpinBudget budget;
  double total = 0;
  for (int i = 0; i < 1600; ++i) {
    double time = 0;
    while (budget.spin(steady_at(time))) time += 1e-6;
    total += time;
    // As on a processor that the peers need: however long it spins.
    budget.found(steady_at(time + 30e-6));
  }
  CHECK(total / 1600 < 5e-6);
}

namespace {

// Work that never ends and whose deadlines are always due, until `kSteps` steps are made.
struct EndlessWork {
  static constexpr int kSteps = 500;
  bool step() {
    longest = std::max(longest, ++steps - steps_at_last_watch);
    return true;
  }
  void watch() { steps_at_last_watch = steps; }
  void fail(const Status& status) { failure = status; }
  bool stopped() const { return steps >= kSteps || !failure.ok(); }
  static bool requests_waiting() { return false; }
  static bool has_running_batch() { return true; }
  static bool has_sleeping_callers() { return false; }
  static bool has_callbacks() { return false; }
  static bool must_poll() { return false; }
  static SteadyTime quiet_since() { return {}; }
  static Seconds sleep_time() { return kForever; }
  static Seconds watch_interval() { return {}; }

  int steps = 0;
  int steps_at_last_watch = 0;
  int longest = 0;  // the most steps between two looks at the deadlines
  Status failure;
};

struct HungryWork : EndlessWork {
  static bool step() { throw std::bad_alloc(); }
};

}  // namespace

TEST_CASE("a rank without memory is named") {
  const auto ranks = make_parts(1);
  HungryWork work;
  ProgressLoop<HungryWork> loop(work, ranks[0]->mesh, *ranks[0]->doorbell, false, 3);
  loop.start();
  loop.join();
  CHECK(work.failure.message == "rank 3: out of memory");
}

TEST_CASE("a loop that always has something to do checks deadlines though its steps may be long") {
  const auto ranks = make_parts(1);
  EndlessWork work;
  ProgressLoop<EndlessWork> loop(work, ranks[0]->mesh, *ranks[0]->doorbell, false, 0);
  loop.start();
  loop.join();
  CHECK(work.failure.ok());
  CHECK(work.steps == EndlessWork::kSteps);
  CHECK(work.longest <= 8);
}
