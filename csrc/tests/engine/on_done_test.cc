// Completion functions: operations call them when they end, so that no thread has to wait.
#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <thread>

#include "harness/cluster.h"

using namespace horoplug;
using namespace horoplug::testing;

namespace {

// Records completion calls, for which a thread can wait.
class Calls {
 public:
  explicit Calls(std::size_t operations) : times_(operations, 0) {
    for (std::size_t i = 0; i < operations; ++i) contexts_.push_back({this, i});
  }

  // Sets the completion function of operation `index`.
  void ask(Engine& engine, hp_handle handle, std::size_t index) {
    engine.on_done(handle, called, &contexts_[index]);
  }

  // Waits for the next completion call and returns its operation. Without a call the process
  // aborts, because pending operations use memory that unwinding would free.
  std::size_t next() {
    std::unique_lock lock(mutex_);
    if (!arrived_.wait_for(lock, std::chrono::seconds(30), [this] { return !ready_.empty(); })) {
      std::fputs("no completion call within 30 seconds\n", stderr);
      std::abort();
    }
    const std::size_t index = ready_.front();
    ready_.pop_front();
    return index;
  }

  // The number of completion calls of each operation.
  std::vector<int> times() const {
    std::lock_guard lock(mutex_);
    return times_;
  }

 private:
  struct Context {
    Calls* calls;
    std::size_t index;
  };

  static void called(void* context) {
    const auto& [calls, index] = *static_cast<Context*>(context);
    std::lock_guard lock(calls->mutex_);
    ++calls->times_[index];
    calls->ready_.push_back(index);
    calls->arrived_.notify_one();
  }

  mutable std::mutex mutex_;
  std::condition_variable arrived_;
  std::deque<std::size_t> ready_;
  std::vector<int> times_;
  std::deque<Context> contexts_;
};

// A float32 allreduce of `count` ones in place.
struct Ones {
  explicit Ones(std::size_t count) : data(count, 1.0F) {}

  hp_handle submit_to(Engine& engine, const std::string& name) {
    Order order;
    order.name = name;
    order.shape = {static_cast<std::int64_t>(data.size())};
    order.input = order.output = data.data();
    return submit(engine, order);
  }
  void check(const Engine& engine) const {
    for (const float value : data) {
      if (value != static_cast<float>(engine.size())) throw std::runtime_error("wrong sum");
    }
  }

  std::vector<float> data;
};

void require(bool condition, const char* what) {
  if (!condition) throw std::runtime_error(what);
}

}  // namespace

TEST_CASE("each of hundreds of operations gets one completion call without a waiting thread") {
  for (const Transport transport : kTransports) {
    for (const int ranks : {1, 2, 4}) {
      CAPTURE(transport_name(transport));
      Cluster cluster(transport, ranks);
      cluster.run([&](int rank) {
        std::mt19937_64 random(test_seed() + static_cast<std::uint64_t>(rank));
        Engine& engine = cluster.engine(rank);
        constexpr std::size_t kOperations = 200;
        Calls calls(kOperations);
        std::vector<Ones> ones;
        std::vector<std::size_t> order;
        for (std::size_t i = 0; i < kOperations; ++i) {
          ones.emplace_back(i * i % 3000 + 1);
          order.push_back(i);
        }
        std::shuffle(order.begin(), order.end(), random);
        std::vector<hp_handle> handles(kOperations);
        std::vector<std::size_t> not_asked;
        for (const std::size_t i : order) {
          handles[i] = ones[i].submit_to(engine, "x" + std::to_string(i));
          // Some completion functions are set at once, some when the operation may have ended.
          if (random() % 4 == 0) {
            not_asked.push_back(i);
          } else {
            calls.ask(engine, handles[i], i);
          }
        }
        for (const std::size_t i : not_asked) calls.ask(engine, handles[i], i);
        for (std::size_t n = 0; n < kOperations; ++n) {
          const std::size_t i = calls.next();
          require(engine.poll(handles[i]).ok(), "called for before it was done");
          ones[i].check(engine);
          engine.handles().release(handles[i]);
        }
        require(calls.times() == std::vector<int>(kOperations, 1), "not once each");
      });
    }
  }
}

TEST_CASE("repeated steps whose operations depend on the previous result complete by calls") {
  for (const Transport transport : {Transport::kThreads, Transport::kTcp}) {
    CAPTURE(transport_name(transport));
    Cluster cluster(transport, 2);
    constexpr std::size_t kSteps = 60;
    constexpr std::size_t kInStep = 3;
    cluster.run([&](int rank) {
      Engine& engine = cluster.engine(rank);
      Calls calls(kSteps * kInStep);
      for (std::size_t i = 0; i < kSteps * kInStep; ++i) {
        Ones ones(100);
        const hp_handle handle = ones.submit_to(engine, "x" + std::to_string(i % kInStep));
        calls.ask(engine, handle, i);
        require(calls.next() == i, "called for another one");
        ones.check(engine);
        engine.handles().release(handle);
      }
    });
    CHECK(cluster.engine(0).stats().planned_batches > 0);  // the steps did run in plans
  }
}

TEST_CASE("repeated steps complete by calls after the program begins to wait for each result") {
  for (const Transport transport : {Transport::kThreads, Transport::kTcp}) {
    CAPTURE(transport_name(transport));
    Cluster cluster(transport, 2);
    constexpr std::size_t kSteps = 40;
    constexpr std::size_t kInStep = 3;
    const auto name_of = [](std::size_t i) { return "x" + std::to_string(i % kInStep); };
    std::vector<std::unique_ptr<Calls>> calls;
    for (int rank = 0; rank < 2; ++rank) {
      calls.push_back(std::make_unique<Calls>((kSteps + 1) * kInStep));
    }
    const auto submit_to = [&](int rank, Ones& ones, std::size_t i) {
      Engine& engine = cluster.engine(rank);
      const hp_handle handle = ones.submit_to(engine, name_of(i));
      calls[static_cast<std::size_t>(rank)]->ask(engine, handle, i);
      return handle;
    };
    cluster.run([&](int rank) {
      for (std::size_t step = 0; step < kSteps; ++step) {
        std::vector<Ones> ones(kInStep, Ones(100));
        std::vector<hp_handle> handles;
        for (std::size_t i = 0; i < kInStep; ++i) {
          handles.push_back(submit_to(rank, ones[i], step * kInStep + i));
        }
        for (std::size_t i = 0; i < kInStep; ++i) calls[static_cast<std::size_t>(rank)]->next();
        for (const hp_handle handle : handles) cluster.engine(rank).handles().release(handle);
      }
    });
    CHECK(cluster.engine(0).stats().planned_batches > 0);
    cluster.run([&](int rank) {
      for (std::size_t i = kSteps * kInStep; i < (kSteps + 1) * kInStep; ++i) {
        Ones ones(100);
        const hp_handle handle = submit_to(rank, ones, i);
        require(calls[static_cast<std::size_t>(rank)]->next() == i, "called for another one");
        ones.check(cluster.engine(rank));
        cluster.engine(rank).handles().release(handle);
      }
    });
  }
}

TEST_CASE("ranks submit from completion calls in different orders") {
  Cluster cluster(Transport::kThreads, 3);
  cluster.run([&](int rank) {
    std::mt19937_64 random(test_seed() + static_cast<std::uint64_t>(rank));
    Engine& engine = cluster.engine(rank);
    constexpr std::size_t kChains = 12;
    constexpr int kLength = 30;
    Calls calls(kChains * kLength);
    std::vector<Ones> ones(kChains * kLength, Ones(50));
    std::vector<hp_handle> handles(kChains * kLength);
    const auto start = [&](std::size_t i) {
      const std::string name = "chain" + std::to_string(i % kChains);
      handles[i] = ones[i].submit_to(engine, name);
      calls.ask(engine, handles[i], i);
    };
    std::vector<std::size_t> first(kChains);
    for (std::size_t i = 0; i < kChains; ++i) first[i] = i;
    std::shuffle(first.begin(), first.end(), random);
    for (const std::size_t i : first) start(i);
    for (std::size_t n = 0; n < ones.size(); ++n) {
      const std::size_t i = calls.next();
      ones[i].check(engine);
      engine.handles().release(handles[i]);
      if (i + kChains < ones.size()) start(i + kChains);
    }
  });
}

TEST_CASE("an operation that fails gets its completion call") {
  Cluster cluster(Transport::kThreads, 2);
  cluster.run([&](int rank) {
    Engine& engine = cluster.engine(rank);
    Calls calls(2);
    Ones ones(rank == 0 ? 10 : 11);
    const hp_handle handle = ones.submit_to(engine, "unlike");
    calls.ask(engine, handle, 0);
    require(calls.next() == 0, "called for another one");
    const Status status = engine.poll(handle);
    require(status.code == HP_MISMATCH && mentions(status, {"'unlike'"}), "another failure");
    engine.handles().release(handle);

    Ones after(10);
    const hp_handle next = after.submit_to(engine, "after");
    calls.ask(engine, next, 1);
    require(calls.next() == 1, "called for another one");
    after.check(engine);
    engine.handles().release(next);
  });
}

TEST_CASE("all operations get their completion call when the engine ends") {
  enum class End { kShutdown, kAbort, kPeerLeaves, kDestruction };
  for (const End end : {End::kShutdown, End::kAbort, End::kPeerLeaves, End::kDestruction}) {
    for (const Transport transport : {Transport::kThreads, Transport::kTcp}) {
      CAPTURE(static_cast<int>(end));
      CAPTURE(transport_name(transport));
      constexpr std::size_t kOperations = 20;
      Calls calls(kOperations);
      std::vector<Ones> ones(kOperations, Ones(100));
      std::vector<hp_handle> handles(kOperations);
      {
        Cluster cluster(transport, 2);
        Engine& engine = cluster.engine(0);
        for (std::size_t i = 0; i < kOperations; ++i) {
          handles[i] = ones[i].submit_to(engine, "pending" + std::to_string(i));
          calls.ask(engine, handles[i], i);
        }
        if (end == End::kShutdown) {
          std::thread other([&] { cluster.engine(1).shutdown(); });
          engine.shutdown();
          // After the shutdown there are no more calls.
          CHECK(calls.times() == std::vector<int>(kOperations, 1));
          other.join();
        } else if (end == End::kAbort) {
          engine.abort("for a test");
        } else if (end == End::kPeerLeaves) {
          cluster.engine(1).shutdown();
        }
        for (std::size_t n = 0; end != End::kDestruction && n < kOperations; ++n) {
          const hp_handle handle = handles[calls.next()];
          const Status status = engine.poll(handle);
          CHECK(status.code == (end == End::kAbort ? HP_ABORTED : HP_SHUT_DOWN));
          engine.handles().release(handle);
        }
      }
      CHECK(calls.times() == std::vector<int>(kOperations, 1));
    }
  }
}

TEST_CASE("a handle accepts one completion function") {
  Cluster cluster(Transport::kThreads, 1);
  Engine& engine = cluster.engine(0);
  Calls calls(2);
  Ones ones(10);
  const hp_handle handle = ones.submit_to(engine, "x");
  calls.ask(engine, handle, 0);
  CHECK(failure_of([&] { calls.ask(engine, handle, 1); }).code == HP_INVALID_ARGUMENT);
  CHECK(failure_of([&] { engine.on_done(handle, nullptr, nullptr); }).code == HP_INVALID_ARGUMENT);
  CHECK(failure_of([&] { calls.ask(engine, handle + 1, 1); }).code == HP_INVALID_ARGUMENT);
  CHECK(calls.next() == 0);
  engine.handles().release(handle);
  CHECK(failure_of([&] { calls.ask(engine, handle, 1); }).code == HP_INVALID_ARGUMENT);
  CHECK(calls.times() == std::vector<int>{1, 0});
}

TEST_CASE("the progress thread knows whether a completion call is still to come") {
  Cluster cluster(Transport::kThreads, 2);
  Calls calls(1);
  Ones ones(10), of_peer(10);
  const hp_handle handle = ones.submit_to(cluster.engine(0), "x");
  calls.ask(cluster.engine(0), handle, 0);
  CHECK(cluster.engine(0).handles().has_callbacks());
  CHECK(!cluster.engine(1).handles().has_callbacks());
  const hp_handle peer = of_peer.submit_to(cluster.engine(1), "x");
  CHECK(calls.next() == 0);
  CHECK(!cluster.engine(0).handles().has_callbacks());
  CHECK(cluster.engine(1).wait(peer, kForever).ok());
  cluster.engine(0).handles().release(handle);
  cluster.engine(1).handles().release(peer);
}
