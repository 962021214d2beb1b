// send and recv between engines, on every transport.
#include <doctest/doctest.h>

#include <algorithm>
#include <latch>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <set>
#include <thread>

#include "harness/cluster.h"
#include "harness/gpu_job.h"

using namespace horoplug;
using namespace horoplug::testing;

namespace {

Order order_of(OpKind op, std::vector<float>& data, int peer, std::int32_t tag = 0) {
  Order order;
  order.op = op;
  order.root = peer;
  order.tag = tag;
  order.shape = {static_cast<std::int64_t>(data.size())};
  order.input = data.data();
  if (op == OpKind::kReceive) order.output = data.data();
  return order;
}

void finish(Engine& engine, hp_handle handle) {
  await(engine, handle);
  engine.handles().release(handle);
}

void expect(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error(what);
}

std::vector<float> numbers(std::size_t count, int first) {
  std::vector<float> data(count);
  std::iota(data.begin(), data.end(), static_cast<float>(first));
  return data;
}

EngineOptions patient() {
  EngineOptions options = test_options();
  options.deadlock_time = kForever;
  return options;
}

}  // namespace

TEST_CASE("a tensor of any size arrives on every transport") {
  for (const Transport transport : kTransports) {
    CAPTURE(transport_name(transport));
    Cluster cluster(transport, 3);
    cluster.run([&](int rank) {
      Engine& engine = cluster.engine(rank);
      const std::size_t most = kSlowedDown ? 300'000 : 6'000'001;
      for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{1000}, most}) {
        // Around a ring, and to the rank itself.
        std::vector<float> mine = numbers(count, rank), from_left(count), own(count);
        const hp_handle handles[] = {
            submit(engine, order_of(OpKind::kSend, mine, (rank + 1) % 3)),
            submit(engine, order_of(OpKind::kSend, mine, rank)),
            submit(engine, order_of(OpKind::kReceive, own, rank)),
            submit(engine, order_of(OpKind::kReceive, from_left, (rank + 2) % 3))};
        for (const hp_handle handle : handles) finish(engine, handle);
        expect(own == mine, "to itself");
        expect(from_left == numbers(count, (rank + 2) % 3), "around the ring");
      }
    });
  }
}

TEST_CASE("many sends in flight arrive by tag, and in order within a tag") {
  const std::uint64_t seed = test_seed();
  for (const Transport transport : {Transport::kThreads, Transport::kTcp, Transport::kMixed}) {
    CAPTURE(seed);
    CAPTURE(transport_name(transport));
    Cluster cluster(transport, 4);
    cluster.run([&](int rank) {
      Engine& engine = cluster.engine(rank);
      const auto set =
          static_cast<std::uint32_t>(await_value(engine, engine.add_set({0, 1, 2, 3})));
      // Known to all ranks: the transfers, in the order in which each rank submits its side of a
      // tag.
      struct Transfer {
        int from, to, tag;
        std::uint32_t set;
        std::size_t count;
      };
      std::mt19937_64 common(seed);
      std::vector<Transfer> all;
      for (int i = 0; i < 300; ++i) {
        all.push_back({static_cast<int>(common() % 4), static_cast<int>(common() % 4),
                       static_cast<int>(common() % 3), common() % 2 == 0 ? set : 0,
                       common() % 2000});
      }
      // Each rank has an order of its own, which keeps that within a tag.
      std::vector<std::size_t> mine(all.size());
      std::iota(mine.begin(), mine.end(), 0);
      std::mt19937_64 own(seed + 1 + static_cast<std::uint64_t>(rank));
      std::vector<int> weights(4 * 4 * 3 * 2);
      for (int& weight : weights) weight = static_cast<int>(own() % 1000);
      const auto key = [&](std::size_t i) {
        const Transfer& t = all[i];
        return weights.at(
            static_cast<unsigned>(((t.from * 4 + t.to) * 3 + t.tag) * 2 + (t.set != 0 ? 1 : 0)));
      };
      std::stable_sort(mine.begin(), mine.end(),
                       [&](std::size_t a, std::size_t b) { return key(a) < key(b); });
      std::vector<std::vector<float>> sent(all.size()), got(all.size());
      std::vector<hp_handle> handles;
      for (const std::size_t i : mine) {
        const Transfer& t = all[i];
        if (t.from == rank) {
          sent[i] = numbers(t.count, static_cast<int>(i));
          Order order = order_of(OpKind::kSend, sent[i], t.to, t.tag);
          order.set = t.set;
          handles.push_back(submit(engine, order));
        }
        if (t.to == rank) {
          got[i].resize(t.count);
          Order order = order_of(OpKind::kReceive, got[i], t.from, t.tag);
          order.set = t.set;
          handles.push_back(submit(engine, order));
        }
      }
      for (const hp_handle handle : handles) finish(engine, handle);
      for (std::size_t i = 0; i < all.size(); ++i) {
        if (all[i].to == rank) {
          expect(got[i] == numbers(all[i].count, static_cast<int>(i)), "wrong contents");
        }
      }
    });
  }
}

TEST_CASE("tensors for which there is no recv yet travel with their offers up to a limit") {
  constexpr int kCount = 300;
  constexpr std::size_t kElements = 4096;  // as many as an offer can have
  for (const Transport transport : {Transport::kInproc, Transport::kTcp}) {
    CAPTURE(transport_name(transport));
    Cluster cluster(transport, 2, patient());
    cluster.run([&](int rank) {
      Engine& engine = cluster.engine(rank);
      const auto meet = [&](const std::string& name) {
        float value = 1;
        Order order;
        order.name = name;
        order.shape = {1};
        order.input = order.output = &value;
        perform(engine, order);
      };
      std::vector<std::vector<float>> data;
      std::vector<hp_handle> handles;
      for (int i = 0; i < kCount; ++i) data.push_back(numbers(kElements, rank == 0 ? i : -1));
      if (rank == 0) {
        for (auto& each : data) {
          handles.push_back(submit(engine, order_of(OpKind::kSend, each, 1)));
        }
        meet("offered");
        const auto bytes = engine.stats().control_bytes;
        CHECK(bytes > 10 * kElements * sizeof(float));
        CHECK(bytes < kCount / 3 * kElements * sizeof(float));
        meet("receive");
      } else {
        meet("offered");
        meet("receive");
        for (auto& each : data) {
          handles.push_back(submit(engine, order_of(OpKind::kReceive, each, 0)));
        }
      }
      for (const hp_handle handle : handles) finish(engine, handle);
      for (int i = 0; i < kCount; ++i) {
        expect(data[static_cast<std::size_t>(i)] == numbers(kElements, i), "wrong contents");
      }
    });
  }
}

TEST_CASE("tensors arrive on every path, in any order of waits, beside collectives") {
  const std::uint64_t seed = test_seed();
  for (const Transport transport : {Transport::kThreads, Transport::kShm, Transport::kMixed}) {
    for (const char* const algorithm : {"", "direct", "stream"}) {
      CAPTURE(seed);
      CAPTURE(algorithm);
      CAPTURE(transport_name(transport));
      constexpr int kRanks = 4;
      EngineOptions options = test_options();
      options.algorithm = algorithm;
      Cluster cluster(transport, kRanks, options);
      cluster.run([&](int rank) {
        Engine& engine = cluster.engine(rank);
        std::mt19937_64 common(seed), own(seed + 1 + static_cast<std::uint64_t>(rank));
        // The data that arrives at a rank, even that of one tensor, is far more than its slots
        // hold.
        const std::size_t most = kSlowedDown ? 60'000 : 800'000;
        const int rounds = kSlowedDown ? 2 : 4;
        for (int round = 0; round < rounds; ++round) {
          struct Work {
            OpKind op;
            int peer, tag;
            std::vector<float> data;
          };
          std::vector<Work> all;
          for (int tag = 0; tag < 60; ++tag) {
            const int from = static_cast<int>(common() % kRanks);
            const int to = static_cast<int>(common() % kRanks);
            const std::size_t count = common() % (common() % 4 == 0 ? most : 5000);
            if (from == rank) all.push_back({OpKind::kSend, to, tag, numbers(count, tag)});
            if (to == rank) all.push_back({OpKind::kReceive, from, tag, std::vector<float>(count)});
          }
          for (int i = 0; i < 4; ++i) all.push_back({OpKind::kAllreduce, 0, i, numbers(10'000, i)});
          std::shuffle(all.begin(), all.end(), own);
          std::vector<hp_handle> handles;
          for (Work& work : all) {
            Order order = order_of(work.op, work.data, work.peer, work.tag);
            if (work.op == OpKind::kAllreduce) {
              order.tag = 0;
              order.name = "beside." + std::to_string(work.tag);
              order.output = work.data.data();
            }
            handles.push_back(submit(engine, order));
          }
          std::shuffle(handles.begin(), handles.end(), own);
          for (const hp_handle handle : handles) finish(engine, handle);
          for (const Work& work : all) {
            if (work.op == OpKind::kSend) continue;
            std::vector<float> expected = numbers(work.data.size(), work.tag);
            if (work.op == OpKind::kAllreduce) {
              for (float& value : expected) value *= kRanks;
            }
            expect(work.data == expected, "contents of " + std::to_string(work.tag));
          }
        }
      });
    }
  }
}

TEST_CASE("two ranks send each other tensors larger than all slots at the same time") {
  for (const Transport transport : {Transport::kThreads, Transport::kShm}) {
    Cluster cluster(transport, 2);
    cluster.run([&](int rank) {
      Engine& engine = cluster.engine(rank);
      const std::size_t count = TransferSlots::kEnd / sizeof(float) + 12'345;
      std::vector<float> mine = numbers(count, rank), got(count);
      const hp_handle send = submit(engine, order_of(OpKind::kSend, mine, 1 - rank));
      perform(engine, order_of(OpKind::kReceive, got, 1 - rank));
      finish(engine, send);
      expect(got == numbers(count, 1 - rank), "contents");
    });
  }
}

TEST_CASE("slots return when process sets are removed while sends are under way") {
  const std::uint64_t seed = test_seed();
  CAPTURE(seed);
  Cluster cluster(Transport::kThreads, 2, patient());
  cluster.run([&](int rank) {
    Engine& engine = cluster.engine(rank);
    std::mt19937_64 own(seed + static_cast<std::uint64_t>(rank));
    for (int round = 0; round < 2 * static_cast<int>(TransferSlots::kSlots); ++round) {
      const auto set = static_cast<std::uint32_t>(await_value(engine, engine.add_set({0, 1})));
      std::vector<std::vector<float>> data(3, std::vector<float>(100'000));
      std::vector<hp_handle> handles;
      for (std::vector<float>& one : data) {
        Order order = order_of(rank == 0 ? OpKind::kSend : OpKind::kReceive, one, 1 - rank);
        order.set = set;
        handles.push_back(submit(engine, order));
        for (auto pause = own() % 3; pause > 0; --pause) std::this_thread::yield();
      }
      await_value(engine, engine.remove_set(set));
      for (const hp_handle handle : handles) {
        const Status status = failure_of([&] { await(engine, handle); });
        expect(status.ok() || status.message.find("was removed") != std::string::npos,
               status.message);
        if (status.ok()) engine.handles().release(handle);
      }
      // A rank that has nothing to do with the set any more still sends and receives.
      std::vector<float> mine = numbers(200'000, rank), got(200'000);
      const hp_handle send = submit(engine, order_of(OpKind::kSend, mine, 1 - rank));
      perform(engine, order_of(OpKind::kReceive, got, 1 - rank));
      finish(engine, send);
      expect(got == numbers(200'000, 1 - rank), "contents");
    }
  });
}

TEST_CASE("an abort in the middle of transfers ends them, and their memory is left alone") {
  const std::uint64_t seed = test_seed();
  CAPTURE(seed);
  for (int round = 0; round < (kSlowedDown ? 5 : 30); ++round) {
    Cluster cluster(Transport::kThreads, 3, patient());
    cluster.run([&](int rank) {
      Engine& engine = cluster.engine(rank);
      std::mt19937_64 own(seed + static_cast<std::uint64_t>(3 * round + rank));
      const int next = (rank + 1) % 3, previous = (rank + 2) % 3;
      const auto left = own() % 8;
      for (std::uint64_t i = 0;; ++i) {
        // The memory is freed as soon as the operations have ended, so that a sanitizer reports
        // later uses.
        std::vector<float> mine = numbers(500'000, rank), got(500'000);
        if (rank == 0 && i == left) engine.abort("enough");
        std::vector<hp_handle> handles;
        const Status refused = failure_of([&] {
          handles.push_back(submit(engine, order_of(OpKind::kSend, mine, next)));
          handles.push_back(submit(engine, order_of(OpKind::kReceive, got, previous)));
        });
        Status failed = refused;
        for (const hp_handle handle : handles) {
          const Status status = failure_of([&] { finish(engine, handle); });
          if (!status.ok()) failed = status;
        }
        if (failed.ok()) continue;
        expect(failed.message.find("enough") != std::string::npos, failed.message);
        return;
      }
    });
  }
}

TEST_CASE("a mismatch fails on both ranks, and the engine stays usable") {
  Cluster cluster(Transport::kThreads, 2);
  cluster.run([&](int rank) {
    Engine& engine = cluster.engine(rank);
    std::vector<float> data(static_cast<std::size_t>(rank + 3));
    const OpKind op = rank == 0 ? OpKind::kSend : OpKind::kReceive;
    const Status status = failure_of([&] { perform(engine, order_of(op, data, 1 - rank, 7)); });
    expect(status.code == HP_MISMATCH, "no mismatch: " + status.message);
    expect(
        mentions(status, {rank == 0 ? "'send.noname.1'" : "'recv.noname.1'",
                          "send from rank 0 to rank 1, tag 7", "[3] on rank 0", "[4] on rank 1"}),
        "text");
    std::vector<float> again(5, 1);
    perform(engine, order_of(op, again, 1 - rank, 7));
  });
}

TEST_CASE("sends and recvs run beside an installed plan and do not break it") {
  Cluster cluster(Transport::kThreads, 3);
  cluster.run([&](int rank) {
    Engine& engine = cluster.engine(rank);
    for (int step = 0; step < 40; ++step) {
      std::vector<std::vector<float>> data(4, std::vector<float>(100, 1));
      std::vector<hp_handle> handles;
      for (std::size_t i = 0; i < data.size(); ++i) {
        Order order = order_of(OpKind::kAllreduce, data[i], 0);
        order.name = "t" + std::to_string(i);
        order.output = data[i].data();
        handles.push_back(submit(engine, order));
      }
      std::vector<float> token{static_cast<float>(step)};
      if (rank == 0) perform(engine, order_of(OpKind::kSend, token, 2));
      if (rank == 2) {
        token[0] = -1;
        perform(engine, order_of(OpKind::kReceive, token, 0));
        expect(token[0] == static_cast<float>(step), "token");
      }
      for (const hp_handle handle : handles) finish(engine, handle);
    }
    expect(engine.stats().planned_batches > 0, "no plan");
    expect(engine.stats().broken_plans == 0, "the plan was broken");
  });
}

TEST_CASE("ranks that wait for sends of each other get a deadlock error that names them") {
  EngineOptions options = test_options();
  options.deadlock_time = Seconds(0.3);
  Cluster cluster(Transport::kThreads, 3, options);
  cluster.run([&](int rank) {
    Engine& engine = cluster.engine(rank);
    if (rank == 2) return;
    std::vector<float> data(2);
    const Status status =
        failure_of([&] { perform(engine, order_of(OpKind::kReceive, data, 1 - rank, rank)); });
    expect(status.code == HP_DEADLOCK, "no deadlock: " + status.message);
    expect(mentions(status, {"recv.noname.1 from rank 1, tag 0", "recv.noname.1 from rank 0, tag 1",
                             "not submitted by rank 0", "not submitted by rank 1"}),
           "text");
    // The engine stays usable.
    const OpKind op = rank == 0 ? OpKind::kSend : OpKind::kReceive;
    perform(engine, order_of(op, data, 1 - rank, 5));
  });
}

TEST_CASE("an operation without a partner ends when its process set is removed") {
  Cluster cluster(Transport::kThreads, 2, patient());
  cluster.run([&](int rank) {
    Engine& engine = cluster.engine(rank);
    const auto set = static_cast<std::uint32_t>(await_value(engine, engine.add_set({0, 1})));
    std::vector<float> data(2);
    Order order = order_of(rank == 0 ? OpKind::kSend : OpKind::kReceive, data, 1 - rank, rank);
    order.set = set;
    const hp_handle handle = submit(engine, order);
    await_value(engine, engine.remove_set(set));
    const Status status = failure_of([&] { await(engine, handle); });
    expect(mentions(status, {"was removed"}), "text");
  });
}

TEST_CASE("an operation without a partner ends when the other rank leaves") {
  Cluster cluster(Transport::kThreads, 2, patient());
  cluster.run([&](int rank) {
    Engine& engine = cluster.engine(rank);
    std::vector<float> data(2);
    if (rank == 0) return engine.shutdown();
    const Status status = failure_of([&] { perform(engine, order_of(OpKind::kReceive, data, 0)); });
    expect(status.code == HP_SHUT_DOWN, "code: " + status.message);
  });
}

TEST_CASE("a recv that is submitted while any rank leaves fails, also if its sender stays") {
  const std::uint64_t seed = test_seed();
  for (std::uint64_t round = 0; round < (kSlowedDown ? 30 : 100); ++round) {
    CAPTURE(seed);
    CAPTURE(round);
    std::mt19937_64 random(seed + round);
    const std::uint64_t spins = random() % 50'000;
    Cluster cluster(Transport::kThreads, 3, patient());
    cluster.run([&](int rank) {
      Engine& engine = cluster.engine(rank);
      if (rank == 1) return;
      if (rank == 2) {
        for (std::uint64_t i = 0; i < spins; ++i) spin_pause();
        return engine.shutdown();
      }
      std::vector<float> data(2);
      std::vector<hp_handle> handles;
      // Until the engine refuses more.
      const Status refused = failure_of([&] {
        for (std::int32_t tag = 0;; ++tag) {
          handles.push_back(submit(engine, order_of(OpKind::kReceive, data, 1, tag)));
          // The engine takes each one, so that some reach it just before it learns of the leave.
          engine.poll(handles.back());
        }
      });
      expect(refused.code == HP_SHUT_DOWN, "refused: " + refused.message);
      for (const hp_handle handle : handles) {
        const Status status = failure_of([&] { await(engine, handle); });
        expect(status.code == HP_SHUT_DOWN, "recv: " + status.message);
      }
    });
  }
}

TEST_CASE("sends and recvs between the other ranks go on when ranks leave") {
  const std::uint64_t seed = test_seed();
  EngineOptions options = patient();
  options.transfers_outlive_ranks = true;
  for (const Transport transport : {Transport::kThreads, Transport::kTcp, Transport::kMixed}) {
    for (std::uint64_t round = 0; round < (kSlowedDown ? 3 : 10); ++round) {
      CAPTURE(seed);
      CAPTURE(round);
      CAPTURE(transport_name(transport));
      struct Transfer {
        int from, to;
        std::size_t count;
      };
      std::mt19937_64 random(seed + round);
      std::vector<Transfer> all;
      const std::size_t sizes[] = {1, 1000, 30'000, 200'000};
      for (int i = 0; i < 60; ++i) {
        all.push_back(
            {static_cast<int>(random() % 4), static_cast<int>(random() % 4), sizes[random() % 4]});
      }
      // Ranks 2 and 3 leave amid their transfers.
      const std::size_t leaves_at[] = {all.size(), all.size(), random() % all.size(),
                                       random() % all.size()};
      Cluster cluster(transport, 4, options);
      std::mutex mutex;
      std::vector<std::string> wrong;
      cluster.run([&](int rank) {
        Engine& engine = cluster.engine(rank);
        const auto check = [&](bool condition, const std::string& what) {
          std::lock_guard lock(mutex);
          if (!condition) wrong.push_back("rank " + std::to_string(rank) + ": " + what);
        };
        std::vector<std::vector<float>> sent(all.size()), got(all.size());
        std::vector<std::pair<std::size_t, hp_handle>> handles;
        for (std::size_t i = 0; i < leaves_at[rank]; ++i) {
          const auto& [from, to, count] = all[i];
          const auto tag = static_cast<std::int32_t>(i);
          if (from == rank) {
            sent[i] = numbers(count, tag);
            handles.emplace_back(i, submit(engine, order_of(OpKind::kSend, sent[i], to, tag)));
          }
          if (to == rank) {
            got[i].resize(count);
            handles.emplace_back(i, submit(engine, order_of(OpKind::kReceive, got[i], from, tag)));
          }
        }
        if (rank >= 2) engine.shutdown();
        for (const auto& [i, handle] : handles) {
          const Status status = failure_of([&, waited = handle] { await(engine, waited); });
          const auto& [from, to, count] = all[i];
          if (status.ok()) {
            check(to != rank || got[i] == numbers(count, static_cast<int>(i)), "wrong contents");
          } else {
            check(status.code == HP_SHUT_DOWN && std::max(from, to) >= 2, status.message);
          }
        }
        if (rank >= 2) return;
        std::vector<float> token(5);
        perform(engine,
                order_of(rank == 0 ? OpKind::kSend : OpKind::kReceive, token, 1 - rank, 99));
        const Order collective{
            .name = "x", .shape = {5}, .input = token.data(), .output = token.data()};
        const Status status = failure_of([&] { perform(engine, collective); });
        check(status.code == HP_SHUT_DOWN, "a collective: " + status.message);
      });
      CHECK(wrong == std::vector<std::string>{});
    }
  }
}

TEST_CASE("a recv from any rank gets the tensor and the number of its sender on every path") {
  for (const Transport transport : {Transport::kThreads, Transport::kTcp}) {
    Cluster cluster(transport, 3, patient());
    cluster.run([&](int rank) {
      Engine& engine = cluster.engine(rank);
      for (const int count : {1, 300000}) {  // in the offer, and after it
        std::vector<float> data(static_cast<std::size_t>(count), static_cast<float>(rank));
        // Each size has a tag of its own: a rank may send the second one before the other ranks
        // have sent the first one.
        if (rank != 0) {
          perform(engine, order_of(OpKind::kSend, data, 0, count));
          continue;
        }
        std::set<std::int64_t> sources;
        for (int i = 0; i < 2; ++i) {
          const hp_handle handle =
              submit(engine, order_of(OpKind::kReceive, data, HP_ANY_RANK, count));
          await(engine, handle);
          const std::int64_t source = engine.handles().done(handle)->value;
          expect(data.front() == static_cast<float>(source), "tensor");
          sources.insert(source);
        }
        expect(sources == std::set<std::int64_t>{1, 2}, "sources");
      }
    });
  }
}

TEST_CASE("ranks that all wait for any rank get a deadlock error") {
  EngineOptions options = test_options();
  options.deadlock_time = Seconds(0.2);
  Cluster cluster(Transport::kThreads, 2, options);
  cluster.run([&](int rank) {
    std::vector<float> data(2);
    const Status status = failure_of(
        [&] { perform(cluster.engine(rank), order_of(OpKind::kReceive, data, HP_ANY_RANK)); });
    expect(mentions(status, {"deadlock", "from any rank"}), "text: " + status.message);
  });
}

TEST_CASE("an abort ends transfers that are under way") {
  Cluster cluster(Transport::kTcp, 2, patient());
  std::latch submitted(1);
  cluster.run([&](int rank) {
    Engine& engine = cluster.engine(rank);
    std::vector<float> data(1000);
    if (rank == 0) {
      const hp_handle handle = submit(engine, order_of(OpKind::kReceive, data, 1, 3));
      submitted.count_down();
      const Status status = failure_of([&] { await(engine, handle); });
      expect(mentions(status, {"recv.noname.1", "rank 1", "enough"}), "text");
    } else {
      submitted.wait();
      engine.abort("enough");
    }
  });
}

TEST_CASE("wrong arguments of one rank are rejected at submission") {
  Cluster cluster(Transport::kThreads, 2);
  Engine& engine = cluster.engine(0);
  std::vector<float> data(2);
  CHECK(mentions(failure_of([&] { submit(engine, order_of(OpKind::kSend, data, 5)); }),
                 {"rank 5 does not exist"}));
  CHECK(mentions(failure_of([&] { submit(engine, order_of(OpKind::kSend, data, 1, -1)); }),
                 {"tags are 0 or more"}));
  Order order = order_of(OpKind::kReceive, data, 1);
  order.output = nullptr;
  CHECK(mentions(failure_of([&] { submit(engine, order); }), {"a tensor without an output"}));
}

TEST_CASE("tensors are sent between GPUs, and between a GPU and a CPU") {
  for (const Transport transport : {Transport::kThreads, Transport::kMixed}) {
    CAPTURE(transport_name(transport));
    GpuJob job({.transport = transport, .ranks = 3});
    job.run([&](int rank) {
      Engine& engine = job.engine(rank);
      Framework& framework = job.framework(rank);
      for (const std::size_t count : {std::size_t{0}, std::size_t{777}, std::size_t{2'000'003}}) {
        if (kSlowedDown && count > 1000) continue;
        const std::size_t bytes = count * sizeof(float);
        const int next = (rank + 1) % 3, previous = (rank + 2) % 3;
        const std::vector<float> mine = numbers(count, rank);
        std::vector<std::byte> raw(bytes);
        if (bytes > 0) std::memcpy(raw.data(), mine.data(), bytes);
        Framework::Array from(framework, bytes), to(framework, bytes), own(framework, bytes);
        from.write(raw);
        std::vector<float> on_host(count);
        const auto on_gpu = [&](OpKind op, Framework::Array& array, int peer, int tag) {
          Order order;
          order.op = op;
          order.root = peer;
          order.tag = tag;
          order.shape = {static_cast<std::int64_t>(count)};
          order.input = array.address();
          if (op == OpKind::kReceive) order.output = array.address();
          order.device = framework.device();
          order.stream = framework.stream();
          return submit(engine, order);
        };
        const hp_handle handles[] = {
            on_gpu(OpKind::kSend, from, next, 0),
            on_gpu(OpKind::kReceive, to, previous, 0),
            on_gpu(OpKind::kSend, from, rank, 1),
            on_gpu(OpKind::kReceive, own, rank, 1),
            on_gpu(OpKind::kSend, from, next, 2),
            submit(engine, order_of(OpKind::kReceive, on_host, previous, 2))};
        for (const hp_handle handle : handles) {
          await(engine, handle);
          RankGpu::make_stream_wait(*engine.handles().done(handle), framework.stream());
          engine.handles().release(handle);
        }
        const std::vector<float> expected = numbers(count, previous);
        expect(on_host == expected, "to the CPU");
        expect(own.read() == raw, "to itself");
        const auto result = to.read();
        expect(bytes == 0 || std::memcmp(result.data(), expected.data(), bytes) == 0, "to a GPU");
      }
    });
  }
}
