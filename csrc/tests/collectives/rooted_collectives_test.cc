// reduce, gather and scatter on every transport, with random shapes, dtypes, roots and process
// sets. Inputs are small integers, so that the expected results are exact in every dtype.
#include <doctest/doctest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <span>

#include "harness/algorithms_run.h"
#include "harness/elements.h"

using namespace horoplug;
using namespace horoplug::testing;

namespace {

using Bytes = std::vector<std::byte>;
using Ranks = std::vector<int>;

constexpr DType kRootedDTypes[] = {DType::kUInt8,   DType::kInt32,    DType::kInt64,
                                   DType::kFloat16, DType::kBFloat16, DType::kFloat32,
                                   DType::kFloat64};
constexpr int kCases = kSlowedDown ? 6 : 20;

double value_of(int rank, std::size_t i) {
  return static_cast<double>((i * 7 + static_cast<std::size_t>(rank) * 3) % 4);
}

Bytes array_of(DType dtype, int rank, std::size_t count) {
  return make_array(dtype, count, 20, [&](std::size_t i) { return value_of(rank, i); });
}

void check_rooted(const std::string& difference, const std::string& what) {
  if (!difference.empty()) throw std::runtime_error(what + ": " + difference);
}

// Random choices, which are the same on all ranks.
struct Draw {
  explicit Draw(std::uint64_t seed) : random(seed) {}
  std::size_t below(std::size_t limit) { return random() % limit; }
  DType dtype() { return kRootedDTypes[below(std::size(kRootedDTypes))]; }
  // Sizes around those at which algorithms change, and 0.
  std::size_t count() {
    constexpr std::size_t kCounts[] = {0, 1, 3, 1025, 70'001, 600'003};
    return kCounts[below(kSlowedDown ? 5 : std::size(kCounts))];
  }
  std::mt19937_64 random;
};

struct Scene {
  Engine& engine;
  int rank;
  Ranks ranks;
  std::uint32_t set;
};

void check_reduce(const Scene& scene, Draw& draw) {
  const DType dtype = draw.dtype();
  const std::size_t count = draw.count();
  const int root = scene.ranks[draw.below(scene.ranks.size())];
  const bool average = draw.below(2) == 0, in_place = draw.below(2) == 0;
  Bytes input = array_of(dtype, scene.rank, count);
  const Bytes before = input;
  Bytes output(in_place ? 0 : input.size());
  Order order;
  order.op = OpKind::kReduce;
  order.dtype = dtype;
  order.reduce = average ? ReduceOp::kAverage : ReduceOp::kSum;
  order.root = root;
  order.set = scene.set;
  // Multiplied by the number of ranks, so that the average is exact.
  order.prescale = average ? static_cast<double>(scene.ranks.size()) : 1;
  order.shape = {static_cast<std::int64_t>(count)};
  order.input = input.data();
  order.output = in_place ? input.data() : output.data();
  const Bytes result = perform(scene.engine, order);
  const std::string what = std::string("reduce ") + dtype_name(dtype) + " x " +
                           std::to_string(count) + " to rank " + std::to_string(root);
  if (scene.rank != root) {
    check_rooted(difference(dtype, result, before), what + ", output of another rank");
    return;
  }
  check_rooted(difference(dtype, result,
                          make_array(dtype, count, 20,
                                     [&](std::size_t i) {
                                       double sum = 0;
                                       for (const int rank : scene.ranks) sum += value_of(rank, i);
                                       return sum;
                                     })),
               what);
}

void check_gather(const Scene& scene, Draw& draw) {
  const DType dtype = draw.dtype();
  const int root = scene.ranks[draw.below(scene.ranks.size())];
  const std::size_t unit = draw.below(2) == 0 ? 3 : 9001;
  std::vector<std::size_t> rows;
  for (std::size_t i = 0; i < scene.ranks.size(); ++i) rows.push_back(draw.below(4) * unit);
  const auto me = static_cast<std::size_t>(
      std::find(scene.ranks.begin(), scene.ranks.end(), scene.rank) - scene.ranks.begin());
  const Bytes input = array_of(dtype, scene.rank, rows[me] * 2);
  Order order;
  order.op = OpKind::kGather;
  order.dtype = dtype;
  order.root = root;
  order.set = scene.set;
  order.shape = {static_cast<std::int64_t>(rows[me]), 2};
  order.input = input.data();
  const Bytes result = perform(scene.engine, order);
  Bytes expected;
  for (std::size_t i = 0; scene.rank == root && i < rows.size(); ++i) {
    const Bytes part = array_of(dtype, scene.ranks[i], rows[i] * 2);
    expected.insert(expected.end(), part.begin(), part.end());
  }
  check_rooted(difference(dtype, result, expected), "gather to rank " + std::to_string(root));
}

void check_scatter(const Scene& scene, Draw& draw) {
  const DType dtype = draw.dtype();
  const int root = scene.ranks[draw.below(scene.ranks.size())];
  const std::size_t unit = draw.below(2) == 0 ? 3 : 9001;
  std::vector<std::int64_t> rows;
  const bool given = draw.below(2) == 0;
  std::int64_t all = 0;
  for (std::size_t i = 0; i < scene.ranks.size(); ++i) {
    rows.push_back(static_cast<std::int64_t>(draw.below(4) * unit));
    all += rows.back();
  }
  if (!given) {
    const auto size = static_cast<std::int64_t>(rows.size());
    for (std::int64_t i = 0; i < size; ++i) {
      rows[static_cast<std::size_t>(i)] = all / size + (i < all % size ? 1 : 0);
    }
  }
  const auto me = static_cast<std::size_t>(
      std::find(scene.ranks.begin(), scene.ranks.end(), scene.rank) - scene.ranks.begin());
  const Bytes whole = array_of(dtype, root, static_cast<std::size_t>(all) * 3);
  Order order;
  order.op = OpKind::kScatter;
  order.dtype = dtype;
  order.root = root;
  order.set = scene.set;
  // On other ranks, only the shape of a row matters.
  order.shape = {scene.rank == root ? all : static_cast<std::int64_t>(me), 3};
  order.input = scene.rank == root ? whole.data() : nullptr;
  if (given && scene.rank == root) order.splits = rows;
  const Bytes result = perform(scene.engine, order);
  const std::size_t row_bytes = 3 * dtype_size(dtype);
  const auto first =
      static_cast<std::size_t>(std::accumulate(
          rows.begin(), rows.begin() + static_cast<std::ptrdiff_t>(me), std::int64_t{0})) *
      row_bytes;
  const auto bytes = static_cast<std::size_t>(rows[me]) * row_bytes;
  const Bytes expected(whole.begin() + static_cast<std::ptrdiff_t>(first),
                       whole.begin() + static_cast<std::ptrdiff_t>(first + bytes));
  check_rooted(difference(dtype, result, expected), "scatter from rank " + std::to_string(root));
}

void run_cases(Cluster& cluster, std::uint64_t seed) {
  cluster.run([&](int rank) {
    Engine& engine = cluster.engine(rank);
    Ranks everyone(static_cast<std::size_t>(cluster.size()));
    std::iota(everyone.begin(), everyone.end(), 0);
    std::vector<Scene> scenes = {{engine, rank, everyone, 0}};
    Draw draw(seed);
    Ranks some;
    for (const int r : everyone) {
      if (draw.below(3) != 0) some.push_back(r);
    }
    if (some.empty()) some = {cluster.size() - 1};
    const auto set = static_cast<std::uint32_t>(await_value(engine, engine.add_set(some)));
    scenes.push_back({engine, rank, some, set});
    for (int i = 0; i < kCases; ++i) {
      const Scene& scene = scenes[draw.below(2)];
      Draw own(draw.random());
      const std::size_t what = draw.below(3);
      if (std::find(scene.ranks.begin(), scene.ranks.end(), rank) == scene.ranks.end()) continue;
      if (what == 0) check_reduce(scene, own);
      if (what == 1) check_gather(scene, own);
      if (what == 2) check_scatter(scene, own);
    }
  });
}

Order reduce_of(std::vector<float>& data, int root, const std::string& name) {
  Order order;
  order.op = OpKind::kReduce;
  order.name = name;
  order.root = root;
  order.shape = {static_cast<std::int64_t>(data.size())};
  order.input = order.output = data.data();
  return order;
}

}  // namespace

TEST_CASE("reduce, gather and scatter give the right results on every transport") {
  const std::uint64_t seed = test_seed();
  for (const Transport transport : kTransports) {
    for (const int ranks : {1, 2, 3, 5}) {
      CAPTURE(transport_name(transport));
      CAPTURE(ranks);
      CAPTURE(seed);
      Cluster cluster(transport, ranks);
      run_cases(cluster, seed + static_cast<std::uint64_t>(ranks));
    }
  }
}

TEST_CASE("reduce gives the right results with each of its algorithms") {
  const std::uint64_t seed = test_seed();
  for (const char* algorithm : {"tree", "chain"}) {
    CAPTURE(algorithm);
    CAPTURE(seed);
    Cluster cluster(Transport::kInproc, 5, options_forcing(algorithm));
    cluster.run([&](int rank) {
      Draw draw(seed);
      Scene scene{cluster.engine(rank), rank, {0, 1, 2, 3, 4}, 0};
      for (int i = 0; i < kCases; ++i) check_reduce(scene, draw);
    });
  }
}

TEST_CASE("reduces to one root share a batch, and reduces to several roots do not") {
  Cluster cluster(Transport::kThreads, 3);
  cluster.run([&](int rank) {
    Engine& engine = cluster.engine(rank);
    std::vector<std::vector<float>> data(12, std::vector<float>(5, static_cast<float>(rank + 1)));
    std::vector<hp_handle> handles;
    for (std::size_t i = 0; i < data.size(); ++i) {
      handles.push_back(
          submit(engine, reduce_of(data[i], i % 4 == 0 ? 2 : 1, "r" + std::to_string(i))));
    }
    for (const hp_handle handle : handles) await(engine, handle);
    for (std::size_t i = 0; i < data.size(); ++i) {
      const int root = i % 4 == 0 ? 2 : 1;
      const float expected = rank == root ? 6.0F : static_cast<float>(rank + 1);
      if (data[i] != std::vector<float>(5, expected)) throw std::runtime_error("wrong result");
    }
  });
}

TEST_CASE("reduce, gather and scatter run in an installed plan") {
  for (const Transport transport : {Transport::kThreads, Transport::kInproc, Transport::kMixed}) {
    CAPTURE(transport_name(transport));
    Cluster cluster(transport, 4);
    cluster.run([&](int rank) {
      Engine& engine = cluster.engine(rank);
      for (int step = 0; step < 30; ++step) {
        const auto value = static_cast<float>(rank + step);
        std::vector<float> sum(100, value), rows(static_cast<std::size_t>(rank + 1), value),
            parts(8);
        std::iota(parts.begin(), parts.end(), static_cast<float>(step));
        const hp_handle reduced = submit(engine, reduce_of(sum, 3, "sum"));
        Order gather;
        gather.op = OpKind::kGather;
        gather.name = "rows";
        gather.root = 1;
        gather.shape = {rank + 1};
        gather.input = rows.data();
        const Bytes gathered = perform(engine, gather);
        Order scatter;
        scatter.op = OpKind::kScatter;
        scatter.name = "parts";
        scatter.root = 2;
        scatter.shape = {8};
        scatter.input = parts.data();
        const Bytes scattered = perform(engine, scatter);
        await(engine, reduced);
        engine.handles().release(reduced);
        const float total = rank == 3 ? static_cast<float>(6 + 4 * step) : value;
        if (sum != std::vector<float>(100, total)) throw std::runtime_error("reduce");
        if (gathered.size() != (rank == 1 ? 10 : 0) * sizeof(float))
          throw std::runtime_error("gather");
        const float expected[] = {static_cast<float>(step + 2 * rank),
                                  static_cast<float>(step + 2 * rank + 1)};
        if (!std::ranges::equal(scattered, std::as_bytes(std::span(expected))))
          throw std::runtime_error("scatter");
      }
      if (engine.stats().planned_batches == 0) throw std::runtime_error("no plan was installed");
    });
  }
}

TEST_CASE("ranks that disagree about the root get an error with both roots") {
  Cluster cluster(Transport::kThreads, 3);
  cluster.run([&](int rank) {
    for (const OpKind op : {OpKind::kReduce, OpKind::kGather, OpKind::kScatter}) {
      std::vector<float> data(3);
      Order order = reduce_of(data, rank == 1 ? 1 : 0, "");
      order.op = op;
      if (op != OpKind::kReduce) order.output = nullptr;
      const Status status = failure_of([&] { perform(cluster.engine(rank), order); });
      if (status.code != HP_MISMATCH) throw std::runtime_error("no mismatch");
      if (!mentions(status, {"mismatched root rank: 0 on ranks 0, 2 but 1 on rank 1"}))
        throw std::runtime_error("text");
    }
  });
}

TEST_CASE("ranks that disagree about the columns of a gather get an error; rows may differ") {
  Cluster cluster(Transport::kThreads, 3);
  cluster.run([&](int rank) {
    std::vector<float> data(6);
    Order order = reduce_of(data, 0, "g");
    order.op = OpKind::kGather;
    order.output = nullptr;
    order.shape = {rank == 0 ? 3 : rank, rank == 2 ? 3 : 2};
    const Status status = failure_of([&] { perform(cluster.engine(rank), order); });
    if (status.code != HP_MISMATCH ||
        !mentions(status, {"mismatched shape: [*, 2] on ranks 0, 1 but [*, 3] on rank 2",
                           "the same dimensions after the first"}))
      throw std::runtime_error(status.message);
  });
}

TEST_CASE("ranks that disagree about the layout get an error that says nothing of the parts") {
  Cluster cluster(Transport::kThreads, 3);
  const auto gather = [&](int rank, const std::string& layout) {
    std::vector<float> data(6);
    Order order = reduce_of(data, 0, "g");
    if (!layout.empty()) {
      order.op = OpKind::kAllgather;
      order.output = nullptr;
      order.layout = layout;
      order.shape = {3, 2};
    }
    perform(cluster.engine(rank), order);
  };
  cluster.run([&](int rank) {
    for (int step = 0; step < 30; ++step) gather(rank, "sparse [4]");  // planned, too
    for (const std::string last : {"sparse [5]", ""}) {
      const std::string layout = rank == 2 ? last : "sparse [4]";
      const Status status = failure_of([&] { gather(rank, layout); });
      const std::string theirs = last.empty() ? "dense float32 [6]" : last;
      if (status.code != HP_LAYOUT_MISMATCH ||
          !mentions(status, {"mismatched layout: sparse [4] on ranks 0, 1 but " + theirs +
                             " on rank 2 (submit the same layout on every rank)"})) {
        throw std::runtime_error(status.message);
      }
    }
    gather(rank, "sparse [4]");
  });
}

TEST_CASE("wrong arguments of one rank are rejected at submission, without the other ranks") {
  Cluster cluster(Transport::kThreads, 2);
  Engine& engine = cluster.engine(0);
  std::vector<float> data(4);
  Order order = reduce_of(data, 7, "r");
  CHECK(mentions(failure_of([&] { submit(engine, order); }), {"root rank 7 does not exist"}));
  order = reduce_of(data, 0, "r");
  order.reduce = ReduceOp::kAdasum;
  CHECK(mentions(failure_of([&] { submit(engine, order); }), {"reduce cannot do adasum"}));
  order = reduce_of(data, 0, "s");
  order.op = OpKind::kScatter;
  order.output = nullptr;
  order.splits = {1, 2};
  CHECK(mentions(failure_of([&] { submit(engine, order); }), {"splits add up to 3"}));
  order.splits = {1, 2, 1};
  CHECK(mentions(failure_of([&] { submit(engine, order); }), {"3 entries for 2 ranks"}));
  order.shape = {};
  order.splits = {};
  CHECK(mentions(failure_of([&] { submit(engine, order); }), {"at least one dimension"}));
}

TEST_CASE("ranks that have joined take part without changing the results") {
  Cluster cluster(Transport::kThreads, 3);
  cluster.run([&](int rank) {
    Engine& engine = cluster.engine(rank);
    if (rank == 1) {
      await_value(engine, engine.join(0));
      return;
    }
    std::vector<float> data{static_cast<float>(rank + 1)};
    perform(engine, reduce_of(data, 2, "sum"));
    if (data[0] != (rank == 2 ? 4.0F : 1.0F)) throw std::runtime_error("reduce");
    std::vector<float> one{1};
    const Status lost = failure_of([&] { perform(engine, reduce_of(one, 1, "lost")); });
    if (!mentions(lost, {"its root, rank 1, has joined"})) throw std::runtime_error("text");
    Order gather = reduce_of(data, 0, "g");
    gather.op = OpKind::kGather;
    gather.output = nullptr;
    if (perform(engine, gather).size() != (rank == 0 ? 8u : 0u)) throw std::runtime_error("gather");
    std::vector<float> parts(6, 5);
    Order scatter = reduce_of(parts, 0, "s");
    scatter.op = OpKind::kScatter;
    scatter.output = nullptr;
    if (perform(engine, scatter).size() != 8) throw std::runtime_error("scatter");
    await_value(engine, engine.join(0));
  });
}
