// Tests of the funnel, which makes all MPI calls on one thread, with a fake MPI that checks the
// thread of each call.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <future>
#include <map>
#include <mutex>
#include <set>
#include <system_error>
#include <thread>
#include <vector>

#include "harness/cluster.h"
#include "harness/int8_reference.h"
#include "tests/harness/fake_mpi.h"
#include "transport/mpi/funnel.h"
#include "transport/mpi/mpi_stream.h"

using namespace horoplug;
using namespace horoplug::testing;

namespace {

constexpr Seconds kTimeout{60};  // no wait of a passing test takes so long

// The operations that ranks have begun. A send is done when its message has been received.
struct FunnelWorld {
  struct Transfer {
    std::byte* memory;
    std::size_t bytes;
    bool done = false;
  };
  struct Sum {
    std::vector<float> total;
    std::vector<std::uint64_t> requests;
  };
  using Route = std::pair<int, int>;  // from, to

  explicit FunnelWorld(int ranks) : size(ranks) {}

  const int size;
  std::mutex mutex;
  std::map<std::uint64_t, Transfer> transfers;
  std::map<Route, std::deque<std::uint64_t>> sends, receives;
  std::map<std::size_t, Sum> sums;
  std::uint64_t last = 0;

  // The caller holds the lock, here and in all further functions.
  std::uint64_t add(void* memory, std::size_t bytes) {
    transfers[++last] = {static_cast<std::byte*>(memory), bytes};
    return last;
  }
  void match(Route route) {
    while (!sends[route].empty() && !receives[route].empty()) {
      Transfer& send = transfers.at(sends[route].front());
      Transfer& receive = transfers.at(receives[route].front());
      CHECK(send.bytes <= receive.bytes);
      std::memcpy(receive.memory, send.memory, send.bytes);
      send.done = receive.done = true;
      sends[route].pop_front();
      receives[route].pop_front();
    }
  }
  void contribute(std::size_t number, std::uint64_t request) {
    Sum& sum = sums[number];
    const Transfer& own = transfers.at(request);
    sum.total.resize(own.bytes / sizeof(float));
    const auto* data = reinterpret_cast<const float*>(own.memory);
    for (std::size_t i = 0; i < sum.total.size(); ++i) sum.total[i] += data[i];
    sum.requests.push_back(request);
    if (sum.requests.size() < static_cast<std::size_t>(size)) return;
    for (const std::uint64_t each : sum.requests) {
      std::memcpy(transfers.at(each).memory, sum.total.data(), own.bytes);
      transfers.at(each).done = true;
    }
  }
};

// The MPI of one rank.
class Fake final : public NoMpi {
 public:
  Fake(FunnelWorld& world, int rank, std::thread::id thread)
      : world_(world), rank_(rank), thread_(thread) {}

  Request send(const void* data, std::size_t bytes, int rank) override {
    const auto lock = called("send");
    const std::uint64_t number = world_.add(const_cast<void*>(data), bytes);
    world_.sends[{rank_, rank}].push_back(number);
    world_.match({rank_, rank});
    return {number, true};
  }
  Request receive(void* data, std::size_t bytes, int rank) override {
    const auto lock = called("receive");
    const std::uint64_t number = world_.add(data, bytes);
    world_.receives[{rank, rank_}].push_back(number);
    world_.match({rank, rank_});
    return {number, true};
  }
  bool has(OpKind kind) const override { return kind == OpKind::kAllreduce; }
  Request allreduce(void* data, std::size_t elements, DType, ReduceOp) override {
    const auto lock = called("allreduce");
    const std::uint64_t number = world_.add(data, elements * sizeof(float));
    world_.contribute(sums_++, number);
    return {number, true};
  }
  bool test(Request& request) override {
    const auto lock = called("test");
    const auto found = world_.transfers.find(request.handle);
    REQUIRE(found != world_.transfers.end());
    if (!found->second.done) return false;
    world_.transfers.erase(found);
    request = {};
    return true;
  }
  void cancel(Request& request) override {
    const auto lock = called("cancel");
    FunnelWorld::Transfer& transfer = world_.transfers.at(request.handle);
    for (auto& [route, numbers] : world_.receives) {
      if (std::erase(numbers, request.handle) != 0) transfer.done = true;
    }
  }
  bool can_reduce(DType dtype, ReduceOp op) const override {
    return dtype == DType::kFloat32 && op == ReduceOp::kSum;
  }
  bool finalized() const override { return false; }

  std::string fails;              // the function that fails; empty: none
  std::shared_future<void> gate;  // if set, calls return only after it is ready
  std::atomic<std::size_t> calls{0};

 private:
  std::unique_lock<std::mutex> called(const char* function) {
    ++calls;
    CHECK(std::this_thread::get_id() == thread_);
    if (gate.valid()) gate.wait();
    if (fails == function) throw std::system_error(17, std::generic_category());
    return std::unique_lock(world_.mutex);
  }

  FunnelWorld& world_;
  const int rank_;
  const std::thread::id thread_;
  std::size_t sums_ = 0;
};

struct Rank {
  Rank(FunnelWorld& world, int rank) {
    std::thread::id thread;
    worker->run([&] { thread = std::this_thread::get_id(); }, kTimeout);
    CHECK(thread != std::this_thread::get_id());
    mpi = std::make_shared<Fake>(world, rank, thread);
    funnel = make_funnel(mpi, worker);
  }
  // Waits until the thread has run all jobs posted so far.
  void flush() const {
    REQUIRE(worker->run([] {}, kTimeout));
  }

  std::shared_ptr<Worker> worker = std::make_shared<Worker>();
  std::shared_ptr<Fake> mpi;
  std::shared_ptr<Mpi> funnel;
};

void finish(const Rank& rank, Mpi::Request& request) {
  while (!rank.funnel->test(request)) rank.flush();
  CHECK_FALSE(request.open);
}

float value(int rank, std::size_t i) {
  return static_cast<float>((static_cast<std::size_t>(rank) * 7 + i) % 13);
}

// Checks sums, and an allgather with different numbers of rows per rank.
void check_results(Engine& engine, int rank, std::size_t count) {
  std::vector<float> input(count);
  std::vector<float> output(count);
  for (std::size_t i = 0; i < count; ++i) input[i] = value(rank, i);
  Order order;
  order.name = "sum." + std::to_string(count);
  order.shape = {static_cast<std::int64_t>(count)};
  order.input = input.data();
  order.output = output.data();
  perform(engine, order);
  for (std::size_t i = 0; i < count; ++i) {
    float sum = 0;
    for (int r = 0; r < engine.size(); ++r) sum += value(r, i);
    if (output[i] != sum) throw std::runtime_error("a sum is wrong");
  }
  order.op = OpKind::kAllgather;
  order.name = "rows." + std::to_string(count);
  order.shape = {static_cast<std::int64_t>(count / static_cast<std::size_t>(rank + 1))};
  order.output = nullptr;
  const std::vector<std::byte> bytes = perform(engine, order);
  std::vector<float> rows(bytes.size() / sizeof(float));
  std::memcpy(rows.data(), bytes.data(), bytes.size());
  std::vector<float> expected;
  for (int r = 0; r < engine.size(); ++r) {
    for (std::size_t i = 0; i < count / static_cast<std::size_t>(r + 1); ++i) {
      expected.push_back(value(r, i));
    }
  }
  if (rows != expected) throw std::runtime_error("rows are wrong");
}

// MPI cannot sum blocks, so that these allreduces only travel over it.
void check_int8(Engine& engine, int rank, std::size_t count) {
  const auto input_of = [&](int r) {
    std::vector<float> values(count);
    for (std::size_t i = 0; i < count; ++i) values[i] = value(r, i) / 3;
    return values;
  };
  std::vector<std::vector<float>> inputs;
  for (int r = 0; r < engine.size(); ++r) inputs.push_back(input_of(r));
  Int8Job reference;
  Order order;
  order.name = "int8." + std::to_string(count);
  order.wire = &int8_format();
  order.shape = {static_cast<std::int64_t>(count)};
  for (int step = 0; step < 3; ++step) {
    const std::vector<float> input = input_of(rank);
    std::vector<float> output(count);
    order.input = input.data();
    order.output = output.data();
    perform(engine, order);
    if (output != reference.allreduce("", inputs, {})) {
      throw std::runtime_error("a sum of int8 blocks is wrong");
    }
  }
}

}  // namespace

TEST_CASE("engines get correct results, and each calls MPI from one thread") {
  for (const Transport transport : {Transport::kTcp, Transport::kMixed}) {
    for (const char* algorithm : {"ring", "mpi"}) {
      CAPTURE(transport_name(transport));
      CAPTURE(algorithm);
      FunnelWorld world(4);
      std::vector<Rank> ranks;
      EngineOptions options = test_options();
      options.algorithm = algorithm;
      auto configs = make_configs(transport, world.size, options);
      for (EngineConfig& config : configs) {
        ranks.emplace_back(world, config.rank);
        use_mpi(config, ranks.back().funnel);
      }
      {
        Cluster cluster(std::move(configs));
        cluster.run([&](int rank) {
          for (const std::size_t count : {1, 1000, 300'000}) {
            check_results(cluster.engine(rank), rank, count);
            check_int8(cluster.engine(rank), rank, count);
          }
        });
      }
      for (const Rank& rank : ranks) CHECK(rank.mpi->calls > 0);
      CHECK((world.sums.size() == 3) == (algorithm == std::string("mpi")));
      for (const auto& [route, numbers] : world.sends) CHECK(numbers.empty());
      // On a busy machine, receives that did not end in time are abandoned to MPI.
      for (const auto& [number, left] : world.transfers) ::operator delete(left.memory);
    }
  }
}

TEST_CASE("exceptions of MPI calls are rethrown by test()") {
  FunnelWorld world(1);
  const Rank rank(world, 0);
  float data = 0;
  for (const std::string function : {"send", "receive", "allreduce", "test", "cancel"}) {
    CAPTURE(function);
    rank.mpi->fails = "";
    Mpi& funnel = *rank.funnel;
    const auto begin = [&] {
      if (function == "send") return funnel.send(&data, sizeof data, 0);
      if (function == "allreduce") return funnel.allreduce(&data, 1, DType::kFloat32, {});
      return funnel.receive(&data, sizeof data, 0);
    };
    rank.mpi->fails = function;
    Mpi::Request request = begin();
    if (function == "cancel") funnel.cancel(request);
    std::error_code code;
    try {
      finish(rank, request);
    } catch (const std::system_error& error) {
      code = error.code();
    }
    CHECK(code == std::error_code(17, std::generic_category()));
    CHECK_FALSE(request.open);
    CHECK(funnel.test(request));  // the request has ended
  }
}

TEST_CASE("test() makes the thread progress its request after earlier calls") {
  FunnelWorld world(1);
  const Rank rank(world, 0);
  float first = 0;
  float second = 0;
  Mpi::Request one = rank.funnel->receive(&first, sizeof first, 0);
  Mpi::Request two = rank.funnel->receive(&second, sizeof second, 0);
  rank.flush();
  CHECK(rank.mpi->calls == 2);
  CHECK_FALSE(rank.funnel->test(one));
  rank.flush();
  CHECK(rank.mpi->calls == 3);
  rank.flush();
  CHECK(rank.mpi->calls == 3);
  const float sent = 3;
  Mpi::Request send = rank.funnel->send(&sent, sizeof sent, 0);
  finish(rank, send);
  finish(rank, one);
  CHECK(first == 3);
  rank.funnel->cancel(two);
  finish(rank, two);
  CHECK(second == 0);
  CHECK(world.transfers.empty());
}

TEST_CASE("after close, MPI keeps open requests and is not called") {
  FunnelWorld world(2);
  const Rank rank(world, 0);
  std::byte nothing{};
  {
    MpiStream stream(rank.funnel, 1);
    CHECK(stream.read(&nothing, 1) == 0);
    const iovec message{&nothing, 1};
    CHECK(stream.write(&message, 1) == 1);
    stream.close();
  }
  rank.flush();
  CHECK(world.receives.at({1, 0}).empty());
  const std::uint64_t send = world.sends.at({0, 1}).front();
  CHECK_FALSE(world.transfers.at(send).done);
  // The memory is still allocated and abandoned to MPI, as is a receive that did not end in time.
  for (const auto& [number, transfer] : world.transfers) ::operator delete(transfer.memory);
  Mpi::Request late = rank.funnel->receive(&nothing, 1, 1);
  CHECK_FALSE(rank.funnel->test(late));
  rank.funnel->close();
  const std::size_t calls = rank.mpi->calls;
  CHECK_FALSE(rank.funnel->test(late));
  rank.funnel->receive(&nothing, 1, 1);
  rank.funnel->cancel(late);
  rank.flush();
  CHECK(rank.mpi->calls == calls);
}

TEST_CASE("a thread that is stuck in MPI blocks no other thread") {
  FunnelWorld world(2);
  std::promise<void> returns;
  std::shared_ptr<Fake> mpi;
  std::weak_ptr<Worker> worker;
  std::byte nothing{};
  {
    const Rank rank(world, 0);
    mpi = rank.mpi;
    worker = rank.worker;
    mpi->gate = returns.get_future().share();
    Mpi::Request request = rank.funnel->receive(&nothing, 1, 1);
    CHECK_FALSE(rank.funnel->test(request));
    CHECK_FALSE(rank.worker->run([] {}, Seconds(0.01)));
    rank.funnel->close();
  }
  CHECK(worker.expired());
  CHECK(mpi->calls <= 1);
  std::weak_ptr<Fake> left = mpi;
  mpi.reset();
  returns.set_value();
  while (!left.expired()) std::this_thread::yield();  // the thread ends now and releases the MPI
  // Without the lock, nothing orders the thread's last accesses before the end of `world`:
  // expired() does not.
  const std::lock_guard after(world.mutex);
}

TEST_CASE("a setting is current on the calling thread from the next call on") {
  struct Noting final : NoMpi {
    OnGpu on_gpu() const override { return OnGpu::kMoves; }
    void set(std::shared_ptr<Setting>) override { set_on = std::this_thread::get_id(); }
    Request barrier() override {
      called_on = set_on;
      return {1, true};
    }
    bool test(Request& request) override {
      request = {};
      return true;
    }
    std::thread::id set_on, called_on;
  };
  const auto mpi = std::make_shared<Noting>();
  const auto worker = std::make_shared<Worker>();
  const auto funnel = make_funnel(mpi, worker);
  CHECK(funnel->on_gpu() == Mpi::OnGpu::kMoves);
  funnel->set(nullptr);
  Mpi::Request request = funnel->barrier();
  while (!funnel->test(request)) std::this_thread::yield();
  std::thread::id worker_is;
  CHECK(worker->run([&] { worker_is = std::this_thread::get_id(); }, kTimeout));
  CHECK(mpi->called_on == worker_is);
}

TEST_CASE("a worker runs all posted functions in order") {
  std::vector<int> order;
  {
    Worker worker;
    for (int i = 0; i < 100; ++i) {
      worker.post([&, i] {
        order.push_back(i);
        if (i == 99) worker.post([&] { order.push_back(100); });
      });
    }
    bool inside = false;
    CHECK(
        worker.run([&] { inside = worker.run([&] { order.push_back(-1); }, kTimeout); }, kTimeout));
    CHECK(inside);
  }
  REQUIRE(order.size() == 102);
  CHECK(std::is_sorted(order.begin(), order.begin() + 100));
  CHECK(std::set<int>(order.begin(), order.end()).size() == 102);
}
