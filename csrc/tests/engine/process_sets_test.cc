// Tests of process sets in whole engines: creation, independent execution, removal.
#include <doctest/doctest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>

#include "harness/cluster.h"
#include "harness/elements.h"
#include "harness/stop.h"

using namespace horoplug;
using namespace horoplug::testing;

namespace {

using Ranks = std::vector<int>;

bool contains(const Ranks& ranks, int rank) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

std::uint32_t add_set(Engine& engine, const Ranks& ranks) {
  return static_cast<std::uint32_t>(await_value(engine, engine.add_set(ranks)));
}

// An allreduce of the rank plus one, with a check of its result.
struct Sum {
  std::uint32_t set;
  Ranks ranks;
  std::string name;
  std::vector<std::byte> data;
  hp_handle handle = 0;

  void start(Engine& engine, int rank, std::size_t count) {
    data = make_array(DType::kFloat64, count, 1, [&](std::size_t) { return rank + 1; });
    Order order;
    order.dtype = DType::kFloat64;
    order.name = name;
    order.shape = {static_cast<std::int64_t>(count)};
    order.input = order.output = data.data();
    order.set = set;
    handle = submit(engine, order);
  }
  void finish(Engine& engine) {
    await(engine, handle);
    engine.handles().release(handle);
    const double sum =
        std::accumulate(ranks.begin(), ranks.end(), 0.0) + static_cast<double>(ranks.size());
    const auto expected =
        make_array(DType::kFloat64, data.size() / sizeof sum, 1, [&](std::size_t) { return sum; });
    const std::string wrong = difference(DType::kFloat64, data, expected);
    if (!wrong.empty()) throw std::runtime_error("set " + std::to_string(set) + ": " + wrong);
  }
};

void sum(Engine& engine, int rank, std::uint32_t set, const Ranks& ranks, const std::string& name,
         std::size_t count = 10) {
  Sum one{set, ranks, name, {}};
  one.start(engine, rank, count);
  one.finish(engine);
}

}  // namespace

constexpr std::size_t kLarge = kSlowedDown ? 70'000 : 300'000;

TEST_CASE("operations of many sets complete when every rank submits them in its own order") {
  const std::uint64_t seed = test_seed();
  for (const Transport transport : kTransports) {
    for (const int size : {2, 5}) {
      if (kSlowedDown && size != 5) continue;
      CAPTURE(transport_name(transport));
      CAPTURE(size);
      CAPTURE(seed);
      std::mt19937_64 common(seed + static_cast<std::uint64_t>(size));
      std::vector<Ranks> sets(6);
      for (Ranks& ranks : sets) {
        for (int rank = 0; rank < size; ++rank) {
          if (common() % 3 != 0) ranks.push_back(rank);
        }
        if (ranks.empty()) ranks = {static_cast<int>(common() % static_cast<unsigned>(size))};
      }
      Cluster cluster(transport, size);
      cluster.run([&](int rank) {
        Engine& engine = cluster.engine(rank);
        std::vector<Sum> sums;
        for (const Ranks& ranks : sets) {
          const std::uint32_t set = add_set(engine, ranks);
          if (!contains(ranks, rank)) continue;
          // Names are unique only within a set.
          for (int i = 0; i < 10; ++i) sums.push_back({set, ranks, "x" + std::to_string(i), {}});
        }
        std::mt19937_64 own(seed + 100 + static_cast<std::uint64_t>(rank));
        for (int step = 0; step < 5; ++step) {
          std::shuffle(sums.begin(), sums.end(), own);
          for (Sum& one : sums) {
            const bool large = step == 4 && (!kSlowedDown || one.name < "x3");
            one.start(engine, rank, large ? kLarge : 7);
          }
          for (Sum& one : sums) one.finish(engine);
        }
      });
    }
  }
}

TEST_CASE("every operation runs in a process set, with global ranks as roots") {
  for (const Transport transport : kTransports) {
    CAPTURE(transport_name(transport));
    Cluster cluster(transport, 4);
    const Ranks ranks{1, 3};
    cluster.run([&](int rank) {
      Engine& engine = cluster.engine(rank);
      const std::uint32_t set = add_set(engine, ranks);
      if (!contains(ranks, rank)) return;
      const auto perform_on = [&](OpKind op, std::int64_t rows) {
        std::vector<float> in(static_cast<std::size_t>(rows), static_cast<float>(rank));
        Order order;
        order.op = op;
        order.shape = {rows};
        order.input = in.data();
        if (op == OpKind::kBroadcast) order.output = in.data();
        order.root = 3;
        order.set = set;
        const auto bytes = perform(engine, order);
        std::vector<float> out(bytes.size() / sizeof(float));
        std::memcpy(out.data(), bytes.data(), bytes.size());
        return out;
      };
      using Floats = std::vector<float>;
      const bool first = rank == 1;
      if (perform_on(OpKind::kBroadcast, 2) != Floats{3, 3}) throw std::runtime_error("broadcast");
      if (perform_on(OpKind::kAllgather, first ? 1 : 2) != Floats{1, 3, 3}) {
        throw std::runtime_error("allgather");
      }
      if (perform_on(OpKind::kAlltoall, 2) != Floats{1, 3}) throw std::runtime_error("alltoall");
      if (perform_on(OpKind::kReducescatter, 3) != (first ? Floats{4, 4} : Floats{4})) {
        throw std::runtime_error("reducescatter");
      }
      Order barrier;
      barrier.op = OpKind::kBarrier;
      barrier.set = set;
      perform(engine, barrier);
    });
  }
}

TEST_CASE("wrong process sets are rejected at submission or on all ranks") {
  Cluster cluster(Transport::kShm, 3);
  cluster.run([&](int rank) {
    Engine& engine = cluster.engine(rank);
    const auto rejected = [&](const std::function<void()>& body, const std::string& words) {
      const Status status = failure_of(body);
      CHECK(status.code == HP_INVALID_ARGUMENT);
      CHECK(mentions(status, {words}));
    };
    rejected([&] { engine.add_set({}); }, "at least one rank");
    rejected([&] { engine.add_set({0, 3}); }, "rank 3 does not exist");
    rejected([&] { engine.add_set({1, 0}); }, "ascending");
    rejected([&] { engine.members(9); }, "process set 9 does not exist");
    rejected([&] { engine.remove_set(9); }, "process set 9 does not exist");
    rejected([&] { engine.remove_set(0); }, "cannot be removed");

    const Status mismatch = failure_of([&] { add_set(engine, {0, rank == 2 ? 2 : 1}); });
    CHECK(mismatch.code == HP_MISMATCH);
    CHECK(mentions(mismatch, {"[0, 1] on ranks 0, 1"}));
    CHECK(mentions(mismatch, {"[0, 2] on rank 2"}));

    const Ranks ranks{0, 2};
    const std::uint32_t set = add_set(engine, ranks);
    if (rank == 1) {
      rejected([&] { engine.members(set); }, "rank 1 is not in process set 1 of ranks 0, 2");
    } else {
      Order order;
      float value = 0;
      order.op = OpKind::kBroadcast;
      order.shape = {1};
      order.input = order.output = &value;
      order.root = 1;
      order.set = set;
      rejected([&] { perform(engine, order); }, "root rank 1 is not in process set 1");
      // Both sides' values, with global ranks.
      order.root = rank;
      order.name = "x";
      const Status status = failure_of([&] { perform(engine, order); });
      CHECK(status.code == HP_MISMATCH);
      CHECK(mentions(status, {"0 on rank 0"}));
      CHECK(mentions(status, {"2 on rank 2"}));
    }
    sum(engine, rank, 0, {0, 1, 2}, "still works");
  });
}

TEST_CASE("removing a set ends its pending operations and frees its memory") {
  for (const Transport transport : {Transport::kShm, Transport::kTcp}) {
    CAPTURE(transport_name(transport));
    Cluster cluster(transport, 3);
    const Ranks ranks{0, 1};
    cluster.run([&](int rank) {
      Engine& engine = cluster.engine(rank);
      for (int round = 0; round < (kSlowedDown ? 15 : 50); ++round) {
        const std::uint32_t set = add_set(engine, ranks);
        if (set != static_cast<std::uint32_t>(round + 1)) throw std::runtime_error("number");
        if (contains(ranks, rank)) sum(engine, rank, set, ranks, "large", 400'000);
        // Rank 0 alone submits this; the set ends before rank 1 does.
        Sum alone{set, ranks, "alone", {}};
        if (rank == 0) alone.start(engine, rank, 4);
        await_value(engine, engine.remove_set(set));
        if (rank == 0) {
          const Status status = failure_of([&] { alone.finish(engine); });
          CHECK(status.code == HP_SHUT_DOWN);
          CHECK(mentions(status, {"'alone' (process set " + std::to_string(set)}));
          CHECK(mentions(status, {"was removed"}));
        }
        CHECK(failure_of([&] { engine.members(set); }).code == HP_INVALID_ARGUMENT);
      }
      sum(engine, rank, 0, {0, 1, 2}, "still works");
    });
  }
}

// `body(rank, round)` runs on all ranks; the segments have their final size after `warm_up` rounds.
void check_segments_stop_growing(Transport transport, int rounds, int warm_up,
                                 const std::function<void(Engine&, int, int)>& body) {
  CAPTURE(transport_name(transport));
  auto configs = make_configs(transport, 4, test_options());
  std::vector<Fd> files;
  for (std::size_t rank = 0; rank < configs.size(); ++rank) {
    files.emplace_back(::dup(configs[rank].members[rank].segment_file.get()));
  }
  const auto sizes = [&] {
    std::vector<off_t> found;
    for (const Fd& file : files) {
      struct stat status{};
      REQUIRE(::fstat(file.get(), &status) == 0);
      found.push_back(status.st_size);
    }
    return found;
  };
  Cluster cluster(std::move(configs));
  std::vector<off_t> warm;
  for (int round = 0; round < rounds; ++round) {
    if (round == warm_up) warm = sizes();
    cluster.run([&](int rank) { body(cluster.engine(rank), rank, round); });
  }
  CHECK(sizes() == warm);
}

TEST_CASE("the memory of a removed set is used again by sets of any ranks") {
  const std::vector<Ranks> sets{{0, 2}, {0, 1, 2, 3}, {1, 3}, {0, 1}, {0, 2, 3}, {2}};
  for (const Transport transport : {Transport::kShm, Transport::kMixed}) {
    check_segments_stop_growing(
        transport, kSlowedDown ? 24 : 60, 12, [&](Engine& engine, int rank, int round) {
          // Two at a time, of which the first one stays a round longer.
          const Ranks& ranks = sets[static_cast<std::size_t>(round) % sets.size()];
          const std::uint32_t set = add_set(engine, ranks);
          if (contains(ranks, rank)) {
            sum(engine, rank, set, ranks, "small");
            sum(engine, rank, set, ranks, "large", kLarge);
          }
          if (round % 2 == 0) return;
          await_value(engine, engine.remove_set(set - 1));
          await_value(engine, engine.remove_set(set));
        });
  }
}

TEST_CASE("the memory of a set is used again if ranks join while it is removed") {
  const Ranks ranks{0, 1, 2};
  check_segments_stop_growing(Transport::kShm, kSlowedDown ? 12 : 40, 6,
                              [&](Engine& engine, int rank, int round) {
                                const std::uint32_t set = add_set(engine, ranks);
                                if (contains(ranks, rank)) sum(engine, rank, set, ranks, "small");
                                const hp_handle removal = engine.remove_set(set);
                                if (rank == round % 4) await(engine, removal);
                                await_value(engine, engine.join(0));
                                await(engine, removal);
                                engine.handles().release(removal);
                              });
}

TEST_CASE("a deadlock in one set does not disturb another set") {
  EngineOptions options = test_options();
  options.deadlock_time = Seconds(0.2);
  Cluster cluster(Transport::kShm, 4, options);
  const Ranks quarrel{1, 2};
  const Ranks friends{0, 3};
  std::atomic<int> failed{0};
  cluster.run([&](int rank) {
    Engine& engine = cluster.engine(rank);
    const std::uint32_t bad = add_set(engine, quarrel);
    const std::uint32_t good = add_set(engine, friends);
    if (contains(quarrel, rank)) {
      const Status status =
          failure_of([&] { sum(engine, rank, bad, quarrel, rank == 1 ? "a" : "b"); });
      CHECK(status.code == HP_DEADLOCK);
      CHECK(mentions(status, {"ank 1 waits for 'a' in process set 1 (not submitted by rank 2)"}));
      CHECK(mentions(status, {"rank 2 waits for 'b' in process set 1 (not submitted by rank 1)"}));
      ++failed;
      sum(engine, rank, bad, quarrel, "again");
    } else {
      // This set runs operations until the other set has failed, so that the other ranks see no
      // deadlock of the job. Rank 0 announces the end.
      for (float over = 0; over == 0;) {
        over = rank == 0 && failed == 2 ? 1.0F : 0.0F;
        Order order;
        order.name = "over";
        order.shape = {1};
        order.input = order.output = &over;
        order.set = good;
        perform(engine, order);
      }
    }
    if (!contains(friends, rank)) return;
    sum(engine, rank, good, friends, "last");
  });
}

TEST_CASE("a rank that shuts down ends its sets, and the errors name it") {
  for (const Transport transport : {Transport::kShm, Transport::kMixed}) {
    CAPTURE(transport_name(transport));
    Cluster cluster(transport, 3);
    std::vector<Sum> sums(3);
    cluster.run([&](int rank) {
      Engine& engine = cluster.engine(rank);
      const std::uint32_t set = add_set(engine, {0, 2});
      if (rank == 0) {
        sums[0] = {set, {0, 2}, "never", {}};
        sums[0].start(engine, 0, 4);
      }
    });
    cluster.engine(2).shutdown();
    const Status status = failure_of([&] { sums[0].finish(cluster.engine(0)); });
    CHECK(status.code == HP_SHUT_DOWN);
    CHECK(mentions(status, {"rank 2"}));
    CHECK(mentions(status, {"'never'"}));
  }
}

TEST_CASE("a stopped rank fails its process set in time while another set makes progress") {
  EngineOptions options = test_options();
  options.data_timeout = Seconds(1.5);
  for (const Transport transport : {Transport::kThreads, Transport::kTcp}) {
    CAPTURE(transport_name(transport));
    Stop stop;
    Cluster cluster(transport, 3, options);
    std::uint32_t with_1 = 0, with_2 = 0;
    cluster.run([&](int rank) {
      Engine& engine = cluster.engine(rank);
      const std::uint32_t first = add_set(engine, {0, 1}), second = add_set(engine, {0, 2});
      if (rank != 0) return;
      with_1 = first;
      with_2 = second;
    });
    float values[4] = {};
    const auto order = [&](int rank, std::uint32_t set) {
      Order sum;
      sum.name = "x";
      sum.shape = {1};
      // Each rank has a value of its own in each set.
      sum.input = sum.output = &values[set == with_1 ? rank : 2 + rank / 2];
      sum.set = set;
      return sum;
    };
    cluster.run([&](int rank) {
      for (int step = 0; step < 12; ++step) {
        if (rank < 2) perform(cluster.engine(rank), order(rank, with_1));
        if (rank != 1) perform(cluster.engine(rank), order(rank, with_2));
      }
    });
    CHECK(cluster.engine(0).stats().planned_batches > 0);
    stop.when_done(cluster.engine(1), submit(cluster.engine(1), order(1, with_1)));
    perform(cluster.engine(0), order(0, with_1));
    stop.await_stopped();

    const auto start = std::chrono::steady_clock::now();
    const auto seconds = [&] {
      return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    };
    constexpr double kMost = 10;
    std::vector<std::thread> others;
    for (const int rank : {0, 2}) {
      others.emplace_back([&, rank] {
        failure_of([&] {
          while (seconds() < kMost) perform(cluster.engine(rank), order(rank, with_2));
        });
      });
    }
    const Status status = failure_of([&] { perform(cluster.engine(0), order(0, with_1)); });
    CHECK(seconds() < kMost);
    CHECK(status.code == HP_TIMEOUT);
    CHECK(mentions(status, {"'x'", "rank 1, which does not answer"}));
    for (std::thread& thread : others) thread.join();
    stop.release();
  }
}
