// join() of ranks that run out of data before the others.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>

#include "device/cpu/identity_element.h"
#include "harness/cluster.h"
#include "harness/elements.h"

using namespace horoplug;
using namespace horoplug::testing;

namespace {

std::vector<double> values_of(DType dtype, const std::vector<std::byte>& bytes) {
  std::vector<double> values;
  for (std::size_t at = 0; at < bytes.size(); at += dtype_size(dtype)) {
    values.push_back(get_element(dtype, bytes.data() + at));
  }
  return values;
}

// Performs an operation whose `rows` elements are all `value`.
std::vector<double> perform_with(Engine& engine, Order order, std::int64_t rows, double value) {
  auto array =
      make_array(order.dtype, static_cast<std::size_t>(rows), [&](std::size_t) { return value; });
  order.shape = {rows};
  order.input = array.data();
  if (order.op == OpKind::kAllreduce || order.op == OpKind::kBroadcast) order.output = array.data();
  return values_of(order.dtype, perform(engine, order));
}

double reduced(ReduceOp op, DType dtype, int first, int last, int size) {
  double result = first;
  for (int value = first + 1; value <= last; ++value) {
    if (dtype == DType::kBool) continue;
    if (op == ReduceOp::kSum || op == ReduceOp::kAverage) result += value;
    if (op == ReduceOp::kProduct) result *= value;
    if (op == ReduceOp::kMax) result = value;
  }
  if (op == ReduceOp::kAverage) result /= size;
  return is_floating(dtype) || is_complex(dtype) ? result : std::trunc(result);
}

}  // namespace

TEST_CASE("reducing with the identity element returns the other operand") {
  for (int op = 0; op < kReduceOpCount; ++op) {
    for (int type = 0; type < kDTypeCount; ++type) {
      const ReduceFn reduce = kernels().reduce[op][type];
      if (reduce == nullptr) continue;
      const auto dtype = static_cast<DType>(type);
      const std::uint64_t identity[2] = {identity_element(static_cast<ReduceOp>(op), dtype), 0};
      for (const double value : {0.0, 1.0, 100.0, -5.0}) {
        if (dtype == DType::kBool && value > 1) continue;
        if (value < 0 && !is_floating(dtype)) continue;
        const auto array = make_array(dtype, 1, [&](std::size_t) { return value; });
        std::byte result[16];
        const void* const sources[] = {identity, array.data()};
        reduce(result, sources, 2, 1, {});
        CAPTURE(reduce_op_name(static_cast<ReduceOp>(op)));
        CAPTURE(dtype_name(dtype));
        CHECK(get_element(dtype, result) == get_element(dtype, array.data()));
      }
    }
  }
}

TEST_CASE("joined ranks do not change the results of the others") {
  for (const Transport transport : kTransports) {
    CAPTURE(transport_name(transport));
    constexpr int kSize = 4;
    Cluster cluster(transport, kSize);
    std::vector<std::int64_t> last(kSize);
    cluster.run([&](int rank) {
      Engine& engine = cluster.engine(rank);
      if (rank < 2) {
        // Ranks 0 and 1 have no data at all.
        last[static_cast<std::size_t>(rank)] = await_value(engine, engine.join(0));
      } else {
        const double mine = rank;  // 2 and 3
        for (const ReduceOp reduce : {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin,
                                      ReduceOp::kMax, ReduceOp::kProduct}) {
          for (int type = 0; type < kDTypeCount; ++type) {
            const auto dtype = static_cast<DType>(type);
            if (!has_reduction(reduce, dtype) || (kSlowedDown && type % 3 != 0)) continue;
            for (const std::int64_t rows : {5, 30'000}) {
              Order order;
              order.dtype = dtype;
              order.reduce = reduce;
              const bool is_bool = dtype == DType::kBool;
              const double expected = is_bool ? 1 : reduced(reduce, dtype, 2, 3, kSize);
              for (const double value : perform_with(engine, order, rows, is_bool ? 1 : mine)) {
                if (value != expected) {
                  throw std::runtime_error(std::string("wrong ") + reduce_op_name(reduce) + " of " +
                                           dtype_name(dtype) + ": " + std::to_string(value));
                }
              }
            }
          }
        }
        using Doubles = std::vector<double>;
        const auto require = [](bool ok, const char* what) {
          if (!ok) throw std::runtime_error(what);
        };
        Order order;
        order.prescale = 10;  // does not apply to the identity elements of joined ranks
        order.reduce = ReduceOp::kProduct;
        require(perform_with(engine, order, 1, mine) == Doubles{600}, "prescale");
        order = {};
        order.op = OpKind::kAllgather;
        require(perform_with(engine, order, rank - 1, mine) == Doubles{2, 3, 3}, "allgather");
        order.op = OpKind::kBroadcast;
        order.root = 3;
        require(perform_with(engine, order, 2, mine) == Doubles{3, 3}, "broadcast");
        order.op = OpKind::kReducescatter;
        require(perform_with(engine, order, 9, mine) == Doubles{5, 5}, "reducescatter");
        order.op = OpKind::kAlltoall;
        order.splits = {0, 0, 1, 2};
        require(perform_with(engine, order, 3, mine) ==
                    (rank == 2 ? Doubles{2, 3} : Doubles{2, 2, 3, 3}),
                "alltoall");
        order.splits = {};
        order.op = OpKind::kBarrier;
        perform(engine, order);
        last[static_cast<std::size_t>(rank)] = await_value(engine, engine.join(0));
      }
      // After the join, all ranks number unnamed operations equally again.
      Order order;
      if (perform_with(engine, order, 3, 1) != std::vector<double>{4, 4, 4}) {
        throw std::runtime_error("wrong sum after the join");
      }
    });
    CHECK((last[0] == 2 || last[0] == 3));
    CHECK(last == std::vector<std::int64_t>(kSize, last[0]));
  }
}

TEST_CASE("ranks join after random amounts of data, repeatedly, with cached names") {
  const std::uint64_t seed = test_seed();
  for (const Transport transport : kTransports) {
    for (const int size : {1, 2, 3, 8}) {
      CAPTURE(transport_name(transport));
      CAPTURE(size);
      CAPTURE(seed);
      std::mt19937_64 random(seed + static_cast<std::uint64_t>(size));
      std::vector<std::vector<int>> steps(4);
      for (auto& epoch : steps) {
        for (int rank = 0; rank < size; ++rank) epoch.push_back(static_cast<int>(random() % 9));
      }
      Cluster cluster(transport, size);
      std::vector<std::vector<std::int64_t>> last(static_cast<std::size_t>(size));
      cluster.run([&](int rank) {
        Engine& engine = cluster.engine(rank);
        for (const auto& epoch : steps) {
          for (int step = 0; step < epoch[static_cast<std::size_t>(rank)]; ++step) {
            const auto active =
                std::count_if(epoch.begin(), epoch.end(), [&](int count) { return count > step; });
            std::vector<std::vector<double>> data(3, std::vector<double>(100, 1));
            std::vector<hp_handle> handles;
            for (std::size_t i = 0; i < data.size(); ++i) {
              Order order;
              order.dtype = DType::kFloat64;
              order.name = "layer" + std::to_string(i);
              order.shape = {100};
              order.input = order.output = data[i].data();
              handles.push_back(submit(engine, order));
            }
            for (const hp_handle handle : handles) {
              await(engine, handle);
              engine.handles().release(handle);
            }
            for (const auto& tensor : data) {
              if (tensor != std::vector<double>(100, static_cast<double>(active))) {
                throw std::runtime_error("wrong sum");
              }
            }
          }
          last[static_cast<std::size_t>(rank)].push_back(await_value(engine, engine.join(0)));
        }
      });
      for (const auto& other : last) CHECK(other == last.front());
      // The last to join was among those with the most data.
      for (std::size_t i = 0; i < steps.size(); ++i) {
        const auto& epoch = steps[i];
        const auto rank = static_cast<std::size_t>(last.front()[i]);
        if (*std::max_element(epoch.begin(), epoch.end()) == 0) continue;
        CHECK(epoch[rank] == *std::max_element(epoch.begin(), epoch.end()));
      }
    }
  }
}

TEST_CASE("an operation that was submitted before the join takes part as usual") {
  Cluster cluster(Transport::kShm, 3);
  cluster.run([&](int rank) {
    Engine& engine = cluster.engine(rank);
    std::vector<float> data(8, static_cast<float>(rank));
    Order order;
    order.op = OpKind::kBroadcast;
    order.name = "early";
    order.shape = {8};
    order.root = 1;
    order.input = order.output = data.data();
    if (rank == 1) {
      const hp_handle early = submit(engine, order);
      await_value(engine, engine.join(0));
      await(engine, early);
      engine.handles().release(early);
    } else {
      perform(engine, order);
      if (data != std::vector<float>(8, 1)) throw std::runtime_error("wrong broadcast");
      await_value(engine, engine.join(0));
    }
  });
}

TEST_CASE(
    "operations that need data of a joined rank fail on the other ranks, and the job continues") {
  for (const Transport transport : {Transport::kShm, Transport::kTcp}) {
    CAPTURE(transport_name(transport));
    Cluster cluster(transport, 3);
    cluster.run([&](int rank) {
      Engine& engine = cluster.engine(rank);
      if (rank == 1) {
        const hp_handle joined = engine.join(0);
        const Status status = failure_of([&] { perform_with(engine, {}, 1, 1); });
        CHECK(status.code == HP_INVALID_ARGUMENT);
        CHECK(mentions(status, {"this rank has joined"}));
        await_value(engine, joined);
        return;
      }
      const auto refused = [&](const std::function<void()>& body, const std::string& words) {
        const Status status = failure_of(body);
        CHECK(status.code == HP_MISMATCH);
        CHECK(mentions(status, {words}));
      };
      Order order;
      order.op = OpKind::kBroadcast;
      order.root = 1;
      order.name = "lost";
      refused([&] { perform_with(engine, order, 4, 1); },
              "'lost' cannot run: its root, rank 1, has joined");
      order.op = OpKind::kAlltoall;
      order.name = "sent";
      order.splits = {1, rank == 0 ? 1 : 0, 1};
      refused([&] { perform_with(engine, order, rank == 0 ? 3 : 2, 1); },
              "'sent' failed: rank 0 would send rows to rank 1");
      refused([&] { await_value(engine, engine.add_set({0, 1})); }, "rank 1 has joined");
      order = {};
      CHECK(perform_with(engine, order, 2, 1) == std::vector<double>{2, 2});
      await_value(engine, engine.join(0));
    });
  }
}

TEST_CASE("a join that cannot end is a deadlock, and the job continues") {
  EngineOptions options = test_options();
  options.deadlock_time = Seconds(0.2);
  Cluster cluster(Transport::kShm, 3, options);
  cluster.run([&](int rank) {
    Engine& engine = cluster.engine(rank);
    const auto set = static_cast<std::uint32_t>(await_value(engine, engine.add_set({0, 1})));
    Order order;
    order.set = set;
    order.name = "x";
    const Status status = failure_of([&] {
      if (rank == 1) {
        perform_with(engine, order, 1, 1);  // rank 0 has joined the global set, but not this set
      } else {
        await_value(engine, engine.join(0));
      }
    });
    CHECK(status.code == HP_DEADLOCK);
    CHECK(mentions(status, {"ank 0 waits for 'join' (not submitted by rank 1)"}));
    CHECK(mentions(status, {"ank 1 waits for 'x' in process set 1 (not submitted by rank 0)"}));
    order = {};
    CHECK(perform_with(engine, order, 2, 1) == std::vector<double>{3, 3});
  });
}
