// Compressed allreduce of float32 with a 16-bit wire dtype: on every transport, for single tensors
// and in batches, it gives the same bits as an allreduce of tensors that were rounded before.
#include <doctest/doctest.h>

#include <random>

#include "harness/algorithms_run.h"
#include "harness/elements.h"
#include "harness/slowed_down.h"

using namespace horoplug;
using namespace horoplug::testing;

namespace {

using Bytes = std::vector<std::byte>;

constexpr DType kWires[] = {DType::kFloat16, DType::kBFloat16};
constexpr ReduceOp kReductions[] = {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin,
                                    ReduceOp::kMax, ReduceOp::kProduct, ReduceOp::kAdasum};
// Sizes around those at which algorithms change; the largest needs several slots.
#if HOROPLUG_SLOWED_DOWN
constexpr std::size_t kCounts[] = {17, 2049, 150'001};
#else
constexpr std::size_t kCounts[] = {0, 1, 17, 1500, 2049, 70'001, 300'003};
#endif

Bytes random_floats(std::size_t count, unsigned seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> value(0, 3);
  return make_array(DType::kFloat32, count, [&](std::size_t) { return value(random); });
}

// The values multiplied by `factor` and converted to the wire dtype.
Bytes narrowed(const Bytes& floats, DType wire, float factor = 1) {
  return make_array(wire, floats.size() / sizeof(float), [&](std::size_t i) {
    return static_cast<float>(get_element(DType::kFloat32, floats.data() + i * sizeof(float))) *
           factor;
  });
}

Bytes widened(const Bytes& values, DType wire) {
  const std::size_t size = dtype_size(wire);
  return make_array(DType::kFloat32, values.size() / size,
                    [&](std::size_t i) { return get_element(wire, values.data() + i * size); });
}

Bytes reduce(Engine& engine, Order order, const Bytes& input, bool in_place = false) {
  Bytes data = input;
  Bytes output(std::max<std::size_t>(input.size(), 1));
  data.resize(output.size());
  order.shape = {static_cast<std::int64_t>(input.size() / dtype_size(order.dtype))};
  order.input = data.data();
  order.output = in_place ? data.data() : output.data();
  return perform(engine, order);
}

void check_all(Engine& engine, int rank, std::uint64_t seed) {
  const bool power_of_two = (engine.size() & (engine.size() - 1)) == 0;
  for (const std::size_t count : kCounts) {
    for (const DType wire : kWires) {
      for (const ReduceOp op : kReductions) {
        if (op == ReduceOp::kAdasum && !power_of_two) continue;
        const bool usual = op == ReduceOp::kAverage || op == ReduceOp::kAdasum;
        if (count > 10'000 && !(usual && wire == DType::kFloat16)) continue;
        const Bytes input = random_floats(count, static_cast<unsigned>(seed) + rank * 7 + count);
        Order order;
        order.reduce = op;
        order.prescale = 1;
        Order narrow = order;
        narrow.dtype = wire;
        order.compressed = wire;
        order.postscale = narrow.postscale = 1.5;
        const Bytes expected = widened(reduce(engine, narrow, narrowed(input, wire)), wire);
        order.prescale = 0.3;
        const Bytes scaled = widened(reduce(engine, narrow, narrowed(input, wire, 0.3F)), wire);
        INFO("seed " << seed << ": " << std::string(dtype_name(wire)) << " x " << count << ", "
                     << std::string(reduce_op_name(op)) << ", rank " << rank);
        const bool same_scaled = reduce(engine, order, input, count % 2 == 0) == scaled;
        CHECK(same_scaled);
        order.prescale = 1;
        const bool same = reduce(engine, order, input, count % 2 == 1) == expected;
        CHECK(same);
      }
    }
  }
}

}  // namespace

TEST_CASE("a compressed allreduce equals an allreduce of tensors that were rounded before") {
  const std::uint64_t seed = test_seed();
  for (const Transport transport : kTransports) {
    for (const int ranks : kSlowedDown ? std::vector{1, 3} : std::vector{1, 2, 3, 4}) {
      if (kSlowedDown && transport == Transport::kShm) continue;
      CAPTURE(transport_name(transport));
      CAPTURE(ranks);
      Cluster cluster(transport, ranks);
      cluster.run([&](int rank) { check_all(cluster.engine(rank), rank, seed); });
    }
  }
}

TEST_CASE("every algorithm supports compression with the same results") {
  const std::uint64_t seed = test_seed();
  for (const char* name : {"ring", "pairwise", "doubling", "hierarchical", "direct"}) {
    CAPTURE(name);
    Cluster cluster(Transport::kMixed, 4, options_forcing(name));
    cluster.run([&](int rank) { check_all(cluster.engine(rank), rank, seed); });
  }
}

TEST_CASE("compressed and uncompressed tensors, and joined ranks, can share batches") {
  Cluster cluster(Transport::kThreads, 3);
  cluster.run([&](int rank) {
    Engine& engine = cluster.engine(rank);
    std::vector<Bytes> inputs, outputs;
    std::vector<hp_handle> handles;
    for (int i = 0; i < 40; ++i) {
      inputs.push_back(make_array(DType::kFloat32, static_cast<std::size_t>(i) * 20,
                                  [&](std::size_t at) { return 1.0009765625 * (at % 7 == 0); }));
      outputs.emplace_back(inputs.back().size() + 1);
    }
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      Order order;
      order.name = "t" + std::to_string(i);
      order.reduce = ReduceOp::kMax;
      if (i % 3 > 0) order.compressed = kWires[i % 3 - 1];
      order.shape = {static_cast<std::int64_t>(inputs[i].size() / sizeof(float))};
      order.input = inputs[i].data();
      order.output = outputs[i].data();
      handles.push_back(submit(engine, order));
    }
    for (std::size_t i = 0; i < handles.size(); ++i) {
      await(engine, handles[i]);
      engine.handles().release(handles[i]);
      outputs[i].pop_back();
      // The input's values are not representable in bfloat16.
      const Bytes rounded = i % 3 > 0
                                ? widened(narrowed(inputs[i], kWires[i % 3 - 1]), kWires[i % 3 - 1])
                                : inputs[i];
      const bool same = outputs[i] == rounded;
      CHECK(same);
    }
    if (rank < 2) {
      Order order;
      order.compressed = DType::kBFloat16;
      order.reduce = ReduceOp::kMin;
      const Bytes two = make_array(DType::kFloat32, 100, [](std::size_t) { return 2.0; });
      for (int i = 0; i < 3; ++i) {
        const bool same = reduce(engine, order, two) == two;
        CHECK(same);
      }
    }
    await_value(engine, engine.join(0));
  });
}

TEST_CASE("different compression on the ranks is a mismatch error") {
  Cluster cluster(Transport::kThreads, 3);
  cluster.run([&](int rank) {
    Order order;
    order.name = "gradient";
    if (rank == 1) order.compressed = DType::kFloat16;
    const Bytes input(400);
    const Status status = failure_of([&] { reduce(cluster.engine(rank), order, input); });
    CHECK(status.code == HP_MISMATCH);
    CHECK(mentions(status, {"gradient", "mismatched compression: none on ranks 0, 2",
                            "float16 on rank 1", "use the same compression="}));
  });
}

TEST_CASE("compression is only supported for allreduce of float32") {
  Cluster cluster(Transport::kThreads, 1);
  const Bytes input(80);
  const auto refused = [&](OpKind op, DType wire) {
    Order order;
    order.op = op;
    order.compressed = wire;
    const Status status = failure_of([&] { reduce(cluster.engine(0), order, input); });
    CHECK(status.code == HP_UNSUPPORTED);
    CHECK(mentions(status, {"compression", op_kind_name(op), dtype_name(wire)}));
  };
  refused(OpKind::kAllreduce, DType::kInt16);
  refused(OpKind::kBroadcast, DType::kFloat16);
  Order order;
  order.dtype = DType::kFloat64;
  order.compressed = DType::kBFloat16;
  const Bytes third = make_array(DType::kFloat64, 5, [](std::size_t) { return 1.0 / 3; });
  const bool same = reduce(cluster.engine(0), order, third) == third;
  CHECK(same);
}
