// Tests of whole engines: negotiation, mismatch errors, deadlocks, dead and unresponsive peers,
// shutdown and abort.
#include <dirent.h>
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <condition_variable>
#include <future>
#include <mutex>
#include <numeric>
#include <thread>

#include "controller/messages/messages.h"
#include "harness/cluster.h"
#include "harness/elements.h"
#include "harness/forwarding_stream.h"
#include "harness/raw_peer.h"
#include "harness/signatures.h"
#include "harness/stop.h"

using namespace horoplug;
using namespace horoplug::testing;

namespace {

// Runs a float32 allreduce of `count` ones and checks the result.
void allreduce_ones(Engine& engine, const std::string& name, std::size_t count = 10) {
  std::vector<float> data(count, 1.0F);
  Order order;
  order.name = name;
  order.shape = {static_cast<std::int64_t>(count)};
  order.input = order.output = data.data();
  perform(engine, order);
  for (const float value : data) {
    if (value != static_cast<float>(engine.size())) throw std::runtime_error("wrong sum");
  }
}

// Every rank runs the operation order_of(rank). Returns the status of each rank.
std::vector<Status> failures_of(Cluster& cluster, const std::function<Order(int rank)>& order_of) {
  std::vector<Status> failures(static_cast<std::size_t>(cluster.size()));
  cluster.run([&](int rank) {
    std::vector<std::byte> memory(1 << 12);
    Order order = order_of(rank);
    order.input = memory.data();
    const bool allocates = order.op == OpKind::kAllgather || order.op == OpKind::kAlltoall;
    order.output = allocates ? nullptr : memory.data();
    failures[static_cast<std::size_t>(rank)] =
        failure_of([&] { perform(cluster.engine(rank), order); });
  });
  return failures;
}

std::size_t count_entries(const char* path) {
  std::size_t count = 0;
  DIR* folder = ::opendir(path);
  while (::readdir(folder) != nullptr) ++count;
  ::closedir(folder);
  return count;
}

}  // namespace

TEST_CASE("hundreds of concurrent operations complete if every rank submits in its own order") {
  for (const Transport transport : kTransports) {
    for (const int ranks : {2, 4}) {
      CAPTURE(transport_name(transport));
      Cluster cluster(transport, ranks);
      cluster.run([&](int rank) {
        std::mt19937_64 random(test_seed() + static_cast<std::uint64_t>(rank));
        Engine& engine = cluster.engine(rank);
        constexpr int kTensors = 150;
        for (int step = 0; step < 3; ++step) {
          std::vector<std::vector<float>> data;
          std::vector<int> order(kTensors);
          std::iota(order.begin(), order.end(), 0);
          std::shuffle(order.begin(), order.end(), random);
          for (int i = 0; i < kTensors; ++i) {
            data.emplace_back(static_cast<std::size_t>(i * i % 3000 + 1), static_cast<float>(i));
          }
          std::vector<hp_handle> handles;
          for (const int i : order) {
            auto& tensor = data[static_cast<std::size_t>(i)];
            Order request;
            request.name = "gradient." + std::to_string(i);
            request.shape = {static_cast<std::int64_t>(tensor.size())};
            request.input = request.output = tensor.data();
            handles.push_back(submit(engine, request));
          }
          for (const hp_handle handle : handles) {
            await(engine, handle);
            engine.handles().release(handle);
          }
          for (int i = 0; i < kTensors; ++i) {
            for (const float value : data[static_cast<std::size_t>(i)]) {
              if (value != static_cast<float>(i * ranks)) throw std::runtime_error("wrong sum");
            }
          }
        }
      });
      const hp_stats stats = cluster.engine(0).stats();
      CHECK(stats.tensors == 450);
      CHECK(stats.batches < 450);  // some of them were fused
    }
  }
}

TEST_CASE(
    "a mismatch is an error on every rank that quotes both signatures, and the job continues") {
  for (const Transport transport : {Transport::kThreads, Transport::kTcp}) {
    Cluster cluster(transport, 3);
    const auto expect = [&](const char* what, const std::function<Order(int)>& order_of,
                            const std::vector<std::string>& words) {
      CAPTURE(what);
      for (const Status& status : failures_of(cluster, order_of)) {
        CHECK(status.code == HP_MISMATCH);
        CHECK(mentions(status, words));
      }
      cluster.run([&](int rank) { allreduce_ones(cluster.engine(rank), "after"); });
    };
    const auto base = [] {
      Order order;
      order.name = "x";
      order.shape = {2, 3};
      return order;
    };
    expect("dtype",
           [&](int rank) {
             Order order = base();
             if (rank == 1) order.dtype = DType::kFloat64;
             return order;
           },
           {"'x'", "float32 on ranks 0, 2", "float64 on rank 1", "data type"});
    expect("shape",
           [&](int rank) {
             Order order = base();
             if (rank == 2) order.shape = {3, 2};
             return order;
           },
           {"'x'", "[2, 3] on ranks 0, 1", "[3, 2] on rank 2"});
    expect("operation",
           [&](int rank) {
             Order order = base();
             if (rank == 0) order.op = OpKind::kAllgather;
             return order;
           },
           {"'x'", "allgather on rank 0", "allreduce on ranks 1, 2"});
    expect("reduction",
           [&](int rank) {
             Order order = base();
             if (rank == 0) order.reduce = ReduceOp::kMax;
             return order;
           },
           {"'x'", "max on rank 0", "sum on ranks 1, 2"});
    expect("root",
           [&](int rank) {
             Order order = base();
             order.op = OpKind::kBroadcast;
             order.root = rank == 1 ? 1 : 0;
             return order;
           },
           {"'x'", "root", "0 on ranks 0, 2", "1 on rank 1"});
    expect("factor",
           [&](int rank) {
             Order order = base();
             order.prescale = rank == 1 ? 0.5 : 2;
             return order;
           },
           {"'x'", "prescale", "2 on ranks 0, 2", "0.5 on rank 1"});
  }
}

// Every rank gives `rows` rows that hold its rank, into `output`. Returns where the result is.
const void* place_of_result(Engine& engine, int rank, OpKind op, std::int64_t rows, float* output,
                            std::vector<float>& result) {
  const std::vector<float> data(static_cast<std::size_t>(2 * rows), static_cast<float>(rank));
  Order order;
  order.op = op;
  order.shape = {rows, 2};
  order.input = data.data();
  order.output = output;
  const hp_handle handle = submit(engine, order);
  await(engine, handle);
  const auto operation = engine.handles().done(handle);
  const auto& outcome = operation->outcomes.front();
  const auto* values = static_cast<const float*>(outcome.data);
  const auto count = static_cast<std::ptrdiff_t>(outcome.bytes / std::int64_t{sizeof(float)});
  result.assign(values, values + count);
  const void* const place = outcome.data;
  engine.handles().release(handle);
  return place;
}

TEST_CASE("results are in the submitted output if they fill it, and in new memory otherwise") {
  for (const Transport transport : {Transport::kThreads, Transport::kTcp}) {
    Cluster cluster(transport, 3);
    cluster.run([&](int rank) {
      Engine& engine = cluster.engine(rank);
      const auto expect = [](bool condition, const std::string& what) {
        if (!condition) throw std::runtime_error(what);
      };
      for (const std::int64_t rows : {6, 30000}) {
        std::vector<float> output(static_cast<std::size_t>(rows) * 6, -1);
        std::vector<float> result;
        for (const OpKind op : {OpKind::kAllgather, OpKind::kAlltoall, OpKind::kReducescatter}) {
          const std::string what = op_kind_name(op);
          expect(place_of_result(engine, rank, op, rows, output.data(), result) == output.data(),
                 what);
          const std::vector<float> given = result;
          expect(place_of_result(engine, rank, op, rows, nullptr, result) != output.data(), what);
          expect(result == given, what + ": values");
        }
        std::fill(output.begin(), output.end(), -1.0F);
        const bool is_root = rank == 0;
        expect((place_of_result(engine, rank, OpKind::kGather, rows, output.data(), result) ==
                output.data()) == is_root,
               "gather");
        // Rank 2 gives more rows, so that the result does not fit on any rank.
        std::fill(output.begin(), output.end(), -1.0F);
        const std::int64_t mine = rank == 2 ? rows + 1 : rows;
        std::vector<float> large(static_cast<std::size_t>(rows + 1) * 6, -1);
        expect(place_of_result(engine, rank, OpKind::kAllgather, mine, large.data(), result) !=
                   large.data(),
               "allgather of unequal rows");
        expect(static_cast<std::int64_t>(result.size()) == 2 * (3 * rows + 1), "size");
        expect(std::all_of(large.begin(), large.end(), [](float v) { return v == -1; }), "output");
      }
    });
  }
}

TEST_CASE("a tensor may change its shape between steps if it does so on all ranks") {
  Cluster cluster(Transport::kThreads, 3);
  for (const std::size_t count : {10, 10, 10, 77, 10, 5}) {
    CHECK_NOTHROW(cluster.run([&](int rank) { allreduce_ones(cluster.engine(rank), "x", count); }));
  }
  const auto failures = failures_of(cluster, [](int rank) {
    Order order;
    order.name = "x";
    order.shape = {rank == 0 ? 5 : 6};
    return order;
  });
  for (const Status& status : failures)
    CHECK(mentions(status, {"'x'", "[5] on rank 0", "[6] on ranks 1, 2"}));
}

TEST_CASE("a deadlock is an error that names the operations, and the job continues") {
  EngineOptions options = test_options();
  options.deadlock_time = Seconds(0.3);
  for (const Transport transport : {Transport::kThreads, Transport::kTcp}) {
    Cluster cluster(transport, 3, options);
    for (int round = 0; round < 2; ++round) {
      const auto failures = failures_of(cluster, [](int rank) {
        Order order;
        order.op = rank == 1 ? OpKind::kAllgather : OpKind::kAllreduce;
        order.shape = {4};
        return order;  // unnamed: afterwards, all ranks must number unnamed operations equally
      });
      for (const Status& status : failures) {
        CHECK(status.code == HP_DEADLOCK);
        CHECK(mentions(status,
                       {"Rank 0 waits for 'allreduce.noname.1' (not submitted by rank 1)",
                        "rank 1 waits for 'allgather.noname.1' (not submitted by ranks 0, 2)"}));
      }
    }
    CHECK_NOTHROW(cluster.run([&](int rank) { allreduce_ones(cluster.engine(rank), ""); }));
  }
}

TEST_CASE("a deadlock across engines is an error of both, and they continue") {
  EngineOptions options = test_options();
  options.deadlock_time = Seconds(0.3);
  Cluster all(Transport::kThreads, 3, options);
  Cluster pair(Transport::kThreads, 2, options);  // ranks 1 and 2
  Cluster trio(Transport::kTcp, 3, options);
  const auto attach = [&] {
    for (int rank = 0; rank < 3; ++rank) {
      if (rank > 0) all.engine(rank).attach(pair.engine(rank - 1), "pair", {1, 2});
      all.engine(rank).attach(trio.engine(rank), "trio", {0, 1, 2});
    }
  };
  const auto one = [](Engine& engine, const std::string& name) {
    Order order;
    order.op = OpKind::kBarrier;
    order.name = name;
    perform(engine, order);
  };
  attach();
  CHECK(failure_of([&] { all.engine(0).attach(trio.engine(0), "x", {0, 1}); }).code ==
        HP_INVALID_ARGUMENT);
  for (int round = 0; round < 2; ++round) {
    all.run([&](int rank) {
      // Each rank waits in another engine.
      const Status status = failure_of([&] {
        one(rank == 0 ? all.engine(0) : rank == 1 ? trio.engine(1) : pair.engine(1), "x");
      });
      CHECK(status.code == HP_DEADLOCK);
      CHECK(mentions(status, {"Rank 0 waits for 'x' (not submitted by ranks 1, 2)",
                              "rank 1 waits for 'x' in group trio (not submitted by ranks 0, 2)",
                              "rank 2 waits for 'x' in group pair (not submitted by rank 1)"}));
    });
    all.run([&](int rank) {
      one(all.engine(rank), "after");
      if (rank > 0) one(pair.engine(rank - 1), "after");
      one(trio.engine(rank), "after");
    });
  }
  // A rank that sleeps may go on.
  all.run([&](int rank) {
    if (rank == 2) std::this_thread::sleep_for(std::chrono::seconds(1));
    if (rank > 0) one(pair.engine(rank - 1), "late");
    one(trio.engine(rank), "late");
  });
}

TEST_CASE("a rank that is busy elsewhere is reported as a stall, not as a deadlock") {
  EngineOptions options = test_options();
  options.deadlock_time = Seconds(0.1);
  options.stall_check_time = Seconds(0.2);
  auto configs = make_configs(Transport::kTcp, 3, options);
  std::mutex mutex;
  std::condition_variable reported;
  std::string log;
  configs[0].log = Log(LogLevel::kWarning, [&](LogLevel, const std::string& text) {
    std::lock_guard lock(mutex);
    log += text + "\n";
    reported.notify_all();
  });
  std::vector<std::unique_ptr<Engine>> engines;
  for (auto& config : configs) engines.push_back(std::make_unique<Engine>(std::move(config)));
  for (auto& engine : engines) engine->wait_until_ready();
  std::vector<std::thread> threads;
  std::atomic<int> good{0};
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      allreduce_ones(*engines[static_cast<std::size_t>(rank)], "late");
      ++good;
    });
  }
  {
    std::unique_lock lock(mutex);
    CHECK(reported.wait_for(lock, std::chrono::seconds(30), [&] { return !log.empty(); }));
    CHECK(log.find("'late'") != std::string::npos);
    CHECK(log.find("waiting for rank 2") != std::string::npos);
    CHECK(log.find("submitted by ranks 0, 1") != std::string::npos);
  }
  allreduce_ones(*engines[2], "late");
  for (auto& thread : threads) thread.join();
  CHECK(good == 2);
  threads.clear();
  for (auto& engine : engines) threads.emplace_back([&engine] { engine.reset(); });
  for (auto& thread : threads) thread.join();
}

TEST_CASE("ranks that wait for each other's threads get a warning and continue") {
  EngineOptions options = test_options();
  options.deadlock_time = Seconds(0.2);
  auto configs = make_configs(Transport::kThreads, 2, options);
  std::promise<std::string> warning;
  std::atomic<bool> warned{false};
  configs[0].log = Log(LogLevel::kWarning, [&](LogLevel, const std::string& text) {
    if (!warned.exchange(true)) warning.set_value(text);
  });
  Cluster cluster(std::move(configs));
  std::barrier both_known(4);
  const std::shared_future<std::string> warns = warning.get_future().share();
  std::vector<std::thread> threads;
  std::atomic<int> good{0};
  for (const int rank : {0, 1}) {
    for (const bool late : {false, true}) {
      threads.emplace_back([&, rank, late] {
        Engine& engine = cluster.engine(rank);
        if (late) allreduce_ones(engine, "before");
        both_known.arrive_and_wait();
        if (late) warns.wait();
        allreduce_ones(engine, (rank == 0) == late ? "x" : "y");
        ++good;
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(good == 4);
  CHECK(mentions({HP_OK, warns.get()}, {"possible deadlock: every rank waits", "'x'", "'y'",
                                        "a thread that does not wait"}));
}

TEST_CASE("an operation of which a rank stops before it submits it fails in time") {
  EngineOptions options = test_options();
  options.data_timeout =
      Seconds(1.5);  // on a busy machine, the others need a while to answer pings
  options.deadlock_time = Seconds(0.5);  // sets the interval of inspections
  for (const int stopped : {0, 1, 2}) {
    for (const bool sends : {false, true}) {
      CAPTURE(stopped);
      CAPTURE(sends);
      Stop stop;
      Cluster cluster(Transport::kTcp, 3, options);
      stop.now(cluster.engine(stopped), stopped);
      const int waiting = stopped == 0 ? 2 : 3 - stopped;
      std::vector<float> data(4, 1.0F);
      Order order;
      order.op = sends ? OpKind::kSend : OpKind::kAllreduce;
      order.name = "late";
      order.shape = {4};
      order.input = data.data();
      order.output = sends ? nullptr : data.data();
      order.root = stopped;
      const Status status = failure_of([&] { perform(cluster.engine(waiting), order); });
      CHECK(status.code == HP_TIMEOUT);
      CHECK(mentions(status, {"late", "waiting for rank " + std::to_string(stopped) +
                                          ", which does not answer"}));
      stop.release();
    }
  }
}

TEST_CASE("an operation that some rank never submits fails the job after the time limit") {
  EngineOptions options = test_options();
  options.stall_shutdown_time = Seconds(0.3);
  Cluster cluster(Transport::kTcp, 3, options);
  std::vector<Status> failures(2);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      failures[static_cast<std::size_t>(rank)] =
          failure_of([&] { allreduce_ones(cluster.engine(rank), "never"); });
    });
  }
  for (auto& thread : threads) thread.join();
  for (const Status& status : failures) {
    CHECK(status.code == HP_TIMEOUT);
    CHECK(mentions(status, {"'never'", "waiting for rank 2"}));
  }
  CHECK(failure_of([&] { allreduce_ones(cluster.engine(2), "later"); }).code == HP_TIMEOUT);
}

TEST_CASE("names in flight are unique, and wrong arguments are rejected at submission") {
  Cluster cluster(Transport::kThreads, 2);
  Engine& engine = cluster.engine(0);
  std::vector<float> data(4, 1);
  Order order;
  order.name = "twice";
  order.shape = {4};
  order.input = order.output = data.data();
  const hp_handle handle = submit(engine, order);
  const Status duplicate = failure_of([&] { submit(engine, order); });
  CHECK(duplicate.code == HP_DUPLICATE_NAME);
  CHECK(mentions(duplicate, {"'twice'", "still in flight"}));

  const auto rejected = [&](const std::function<void(Order&)>& spoil,
                            const std::vector<std::string>& words) {
    Order spoiled = order;
    spoiled.name = "wrong";
    spoil(spoiled);
    const Status status = failure_of([&] { submit(engine, spoiled); });
    CHECK((status.code == HP_INVALID_ARGUMENT || status.code == HP_UNSUPPORTED));
    CHECK(mentions(status, words));
  };
  rejected(
      [](Order& o) {
        o.op = OpKind::kBroadcast;
        o.root = 2;
      },
      {"root rank 2", "0 to 1"});
  rejected([](Order& o) { o.shape = {-1}; }, {"negative", "[-1]"});
  rejected([](Order& o) { o.shape = {std::int64_t{1} << 62, 4}; }, {"too many elements"});
  rejected([](Order& o) { o.input = nullptr; }, {"without memory"});
  rejected(
      [](Order& o) {
        o.reduce = ReduceOp::kAdasum;
        o.dtype = DType::kInt32;
      },
      {"Adasum", "bfloat16", "int32"});
  rejected(
      [](Order& o) {
        o.op = OpKind::kReducescatter;
        o.reduce = ReduceOp::kAdasum;
      },
      {"reducescatter", "adasum"});
  rejected(
      [](Order& o) {
        o.dtype = DType::kBool;
        o.reduce = ReduceOp::kAverage;
      },
      {"bool", "average"});
  rejected(
      [](Order& o) {
        o.op = OpKind::kAlltoall;
        o.output = nullptr;
        o.shape = {3};
      },
      {"multiple of 2"});
  rejected(
      [](Order& o) {
        o.op = OpKind::kAlltoall;
        o.output = nullptr;
        o.splits = {1, 2};
      },
      {"add up to 3"});
  rejected(
      [](Order& o) {
        o.op = OpKind::kAlltoall;
        o.output = nullptr;
        o.splits = {4};
      },
      {"1 entries for 2"});
  rejected(
      [](Order& o) {
        o.op = OpKind::kReducescatter;
        o.shape = {};
      },
      {"at least one dimension"});

  allreduce_ones(cluster.engine(1), "twice", 4);
  await(engine, handle);
  CHECK(engine.handles().poll(handle).ok());
  engine.handles().release(handle);
  CHECK(failure_of([&] { engine.handles().poll(handle); }).code == HP_INVALID_ARGUMENT);
}

TEST_CASE("when a rank shuts down, the operations of the other ranks fail and name it") {
  for (const Transport transport : kTransports) {
    CAPTURE(transport_name(transport));
    Cluster cluster(transport, 3);
    cluster.run([&](int rank) { allreduce_ones(cluster.engine(rank), "before"); });
    cluster.run([&](int rank) {
      Engine& engine = cluster.engine(rank);
      if (rank == 1) return engine.shutdown();
      const Status pending = failure_of([&] { allreduce_ones(engine, "pending"); });
      if (pending.code != HP_SHUT_DOWN)
        throw std::runtime_error("code " + std::to_string(pending.code));
      if (!mentions(pending, {"'pending'", "rank 1 has shut down"}))
        throw std::runtime_error("text");
      const Status later = failure_of([&] { allreduce_ones(engine, "later"); });
      if (later.code != HP_SHUT_DOWN) throw std::runtime_error("later");
    });
  }
}

TEST_CASE("operations that were decided before a shutdown still run") {
  for (const Transport transport : kTransports) {
    for (int round = 0; round < (kSlowedDown ? 6 : 20); ++round) {
      CAPTURE(transport_name(transport));
      Cluster cluster(transport, 3);
      // The root of the broadcast finishes first and shuts down while others may still receive.
      CHECK_NOTHROW(cluster.run([&](int rank) {
        Engine& engine = cluster.engine(rank);
        std::vector<int> data(200'000, rank == round % 3 ? 7 : 0);
        Order order;
        order.op = OpKind::kBroadcast;
        order.dtype = DType::kInt32;
        order.root = round % 3;
        order.shape = {static_cast<std::int64_t>(data.size())};
        order.input = order.output = data.data();
        perform(engine, order);
        engine.shutdown();
        if (std::count(data.begin(), data.end(), 7) != static_cast<long>(data.size())) {
          throw std::runtime_error("wrong data");
        }
      }));
    }
  }
}

TEST_CASE("an abort reaches every rank with its reason") {
  Cluster cluster(Transport::kMixed, 4);
  cluster.run([&](int rank) {
    Engine& engine = cluster.engine(rank);
    if (rank == 2) return engine.abort("a test");
    const Status status = failure_of([&] { allreduce_ones(engine, "x"); });
    if (status.code != HP_ABORTED) throw std::runtime_error("code");
    if (!mentions(status, {"rank 2 has aborted the job: a test"})) throw std::runtime_error("text");
  });
}

TEST_CASE("operations fail with the rank of a peer that has died") {
  HalfJob job;
  job.introduce();
  std::vector<float> data(4, 1);
  Order order;
  order.name = "x";
  order.shape = {4};
  order.input = order.output = data.data();
  const hp_handle handle = submit(*job.engine, order);
  job.peer->hang_up();
  const Status status = failure_of([&] { await(*job.engine, handle); });
  CHECK(status.code == HP_ABORTED);
  CHECK(mentions(status, {"allreduce 'x'", "rank 1 has died or lost its connection"}));
  CHECK(failure_of([&] { submit(*job.engine, order); }).code == HP_ABORTED);
}

TEST_CASE("peers are notified of a failure before this rank's own operations end") {
  // Otherwise a program that exits after its operation has failed could end before it notifies
  // them.
  class Watched final : public ForwardingStream {
   public:
    using ForwardingStream::ForwardingStream;
    std::size_t write(const iovec* parts, int count) override {
      const std::size_t taken = ForwardingStream::write(parts, count);
      if (on_write) on_write(parts, count);
      return taken;
    }
    std::function<void(const iovec*, int)> on_write;
  };

  const EngineOptions options = test_options();
  auto configs = make_configs(Transport::kTcp, 3, options);
  RawPeer listener(std::move(configs[1].members[0].stream));
  RawPeer victim(std::move(configs[2].members[0].stream));
  auto watched = std::make_unique<Watched>(std::move(configs[0].members[1].stream));
  std::atomic<Engine*> running{nullptr};
  std::atomic<hp_handle> handle{0};
  std::atomic<int> code_when_told{-1};
  watched->on_write = [&](const iovec* parts, int count) {
    if (handle == 0 || count < 2) return;
    const Bytes message(static_cast<const std::byte*>(parts[1].iov_base),
                        static_cast<const std::byte*>(parts[1].iov_base) + parts[1].iov_len);
    Reader reader(message);
    if (read_head(reader).kind != MessageKind::kAbort) return;
    // If the operation has ended, its handle may be released and unknown.
    const Status found =
        failure_of([&] { code_when_told = running.load()->handles().poll(handle).code; });
    if (!found.ok()) code_when_told = found.code;
  };
  configs[0].members[1].stream = std::move(watched);
  Engine engine(std::move(configs[0]));
  running = &engine;
  listener.send(encode(hello_of(1, 3, options)));
  victim.send(encode(hello_of(2, 3, options)));
  engine.wait_until_ready();
  std::vector<float> data(4, 1);
  Order order;
  order.name = "x";
  order.shape = {4};
  order.input = order.output = data.data();
  handle = submit(engine, order);
  victim.hang_up();
  CHECK(failure_of([&] { await(engine, handle); }).code == HP_ABORTED);
  engine.shutdown();  // the progress thread has written all messages when this returns
  CHECK(code_when_told == HP_IN_PROGRESS);
}

TEST_CASE("a transfer without progress fails after data_timeout and names the peer") {
  EngineOptions options = test_options();
  options.data_timeout = Seconds(0.3);
  HalfJob job(options);
  job.introduce(options);
  std::vector<float> data(4, 1);
  Order order;
  order.name = "x";
  order.shape = {4};
  order.input = order.output = data.data();
  const hp_handle handle = submit(*job.engine, order);
  Ready ready;
  ready.requests = {{"x", {{sum_of(4), {}}}}};
  job.peer->send(encode(0, ready));
  const Status status = failure_of([&] { await(*job.engine, handle); });
  CHECK(status.code == HP_TIMEOUT);
  CHECK(mentions(status, {"allreduce 'x'", "no progress for 0.3 s", "waiting for rank 1"}));
}

TEST_CASE("the handshake fails after data_timeout if a peer does not answer") {
  EngineOptions options = test_options();
  options.data_timeout = Seconds(0.2);
  HalfJob job(options);
  const Status status = failure_of([&] { job.engine->wait_until_ready(); });
  CHECK(status.code == HP_TIMEOUT);
  CHECK(mentions(status, {"no answer from rank 1"}));
}

TEST_CASE("the handshake succeeds if a peer shuts down before it is finished") {
  ThirdOfJob job(1);
  job.shut_down(0);
  job.introduce(2);
  CHECK(failure_of([&] { job.engine->wait_until_ready(); }).ok());
  const Status status = failure_of([&] { allreduce_ones(*job.engine, "x"); });
  CHECK(status.code == HP_SHUT_DOWN);
  CHECK(mentions(status, {"rank 0 has shut down"}));
  job.at(2).send(encode(MessageKind::kBye));
  job.at(2).hang_up();
}

TEST_CASE("the handshake fails with the rank that has died, though another one has shut down") {
  // Both happen after the handshake, before the thread that waits for the handshake wakes up.
  ThirdOfJob job(1);
  job.shut_down(0);
  job.introduce(2);
  REQUIRE(comes_to(
      [&] { return failure_of([&] { allreduce_ones(*job.engine, "x"); }).code == HP_SHUT_DOWN; }));
  job.at(2).hang_up();
  REQUIRE(comes_to([&] { return job.engine->stats().failed == 1; }));
  job.engine->shutdown();  // returns when the engine has stopped
  const Status status = failure_of([&] { job.engine->wait_until_ready(); });
  CHECK(status.code == HP_ABORTED);
  CHECK(mentions(status, {"rank 2 has died or lost its connection"}));
}

TEST_CASE("the handshake fails if ranks have different settings") {
  EngineOptions other = test_options();
  other.fusion_threshold = 12345;
  HalfJob job;
  job.peer->send(encode(hello_of(1, 2, other)));
  const Status status = failure_of([&] { job.engine->wait_until_ready(); });
  CHECK(status.code == HP_MISMATCH);
  CHECK(mentions(status, {"fusion threshold", "12345 on rank 1"}));
}

TEST_CASE("malformed bytes from a peer fail the job with that peer's rank and do not crash") {
  const auto failure_after = [](const std::function<void(RawPeer&)>& speak, bool introduced) {
    HalfJob job;
    if (introduced) job.introduce();
    std::thread speaker([&] { speak(*job.peer); });
    Status status;
    if (introduced) {
      status = failure_of([&] { allreduce_ones(*job.engine, "x"); });
    } else {
      status = failure_of([&] { job.engine->wait_until_ready(); });
    }
    speaker.join();
    return status;
  };
  const Bytes noise(100, std::byte{0x5A});
  FrameHeader large;
  large.bytes = std::uint64_t{1} << 62;
  FrameHeader large_data = large;
  large_data.kind = FrameHeader::kData;
  FrameHeader unknown_kind;
  unknown_kind.kind = 99;
  for (const bool introduced : {false, true}) {
    CAPTURE(introduced);
    for (const auto& speak : std::vector<std::function<void(RawPeer&)>>{
             [&](RawPeer& peer) { peer.send_bytes({noise.begin(), noise.end()}); },
             [&](RawPeer& peer) { peer.send(noise); }, [&](RawPeer& peer) { peer.send(Bytes{}); },
             [&](RawPeer& peer) { peer.send(large, {}); },
             [&](RawPeer& peer) { peer.send(large_data, {}); },
             [&](RawPeer& peer) { peer.send(unknown_kind, {}); }}) {
      const Status status = failure_after(speak, introduced);
      CHECK(status.code == HP_ABORTED);
      CHECK(mentions(status, {"rank 1", "malformed message"}));
    }
  }
  const Status twice =
      failure_after([](RawPeer& peer) { peer.send(encode(hello_of(1, 2, test_options()))); }, true);
  CHECK(mentions(twice, {"rank 1", "introduced itself twice"}));
}

TEST_CASE("engines release their file descriptors and threads") {
  const auto cycle = [](Transport transport) {
    Cluster cluster(transport, 2);
    cluster.run([&](int rank) { allreduce_ones(cluster.engine(rank), "x", 1000); });
  };
  for (const Transport transport : kTransports) {
    for (int i = 0; i < 3; ++i) cycle(transport);
    const std::size_t fds = count_entries("/proc/self/fd");
    const std::size_t threads = count_entries("/proc/self/task");
    for (int i = 0; i < (kSlowedDown ? 20 : 60); ++i) cycle(transport);
    CHECK(count_entries("/proc/self/fd") == fds);
    // The kernel may still list a thread for a moment after it was joined.
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (count_entries("/proc/self/task") > threads && std::chrono::steady_clock::now() < limit) {
      std::this_thread::yield();
    }
    CHECK(count_entries("/proc/self/task") <= threads);
  }
}

TEST_CASE("a job of one rank runs without peers") {
  Cluster cluster(Transport::kInproc, 1);
  allreduce_ones(cluster.engine(0), "x");
  CHECK(cluster.engine(0).stats().control_messages == 0);
}
