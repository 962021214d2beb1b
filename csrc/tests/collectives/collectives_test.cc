// Every operation on every transport, with whole engines: a grid of dtypes, reductions, numbers of
// ranks and sizes. Inputs are small integers, so that the expected results are exact in every
// dtype.
#include <doctest/doctest.h>

#include <numeric>
#include <stdexcept>
#include <string>

#include "harness/algorithms_run.h"
#include "harness/elements.h"
#include "harness/slowed_down.h"

using namespace horoplug;
using namespace horoplug::testing;

namespace {

using Bytes = std::vector<std::byte>;

// The whole grid takes minutes under a sanitizer. The defects that sanitizers find do not depend on
// the dtype.
#if HOROPLUG_SLOWED_DOWN
constexpr DType kDTypes[] = {DType::kBool, DType::kInt8, DType::kFloat16, DType::kFloat64};
constexpr int kSizes[] = {1, 2, 3, 5};
constexpr std::size_t kLargeCounts[] = {70'001, 270'003};
constexpr int kForcedRanks[] = {6};
constexpr std::size_t kForcedCounts[] = {1, 999, 140'007};
constexpr std::size_t kGatheredUnits[] = {1, 3'001};
constexpr std::size_t kScatteredRows[] = {1, 2, 5, 13, 9'007};
constexpr int kLaneRanks[] = {4};
constexpr std::size_t kSeveralBlocks = 1'300'003;
#else
constexpr DType kDTypes[] = {DType::kBool,    DType::kUInt8,     DType::kInt8,      DType::kUInt16,
                             DType::kInt16,   DType::kUInt32,    DType::kInt32,     DType::kUInt64,
                             DType::kInt64,   DType::kFloat16,   DType::kBFloat16,  DType::kFloat32,
                             DType::kFloat64, DType::kComplex64, DType::kComplex128};
constexpr int kSizes[] = {1, 2, 3, 4, 5, 6, 7, 8};
constexpr std::size_t kLargeCounts[] = {70'001, 600'003};
constexpr int kForcedRanks[] = {2, 3, 6, 7};
constexpr std::size_t kForcedCounts[] = {1, 999, 300'007, 1'700'003};
constexpr std::size_t kGatheredUnits[] = {1, 16'001};
constexpr std::size_t kScatteredRows[] = {1, 2, 5, 13, 100'003};
constexpr int kLaneRanks[] = {2, 4, 5};
constexpr std::size_t kSeveralBlocks = 2'300'003;
#endif
constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin, ReduceOp::kMax,
                             ReduceOp::kProduct};
// Sizes around those at which algorithms change: the flag-line allreduce takes up to 4 KiB, a slot
// and a chunk on a stream have 256 KiB.
constexpr std::size_t kSmallCounts[] = {0, 1, 3, 17, 1024, 1025, 2049};

double input_value(ReduceOp op, int rank, std::size_t i) {
  switch (op) {
    case ReduceOp::kAverage:
      return static_cast<double>(i % 5) + 2 * rank;
    case ReduceOp::kProduct:
      return (i + static_cast<std::size_t>(rank)) % 4 == 0 ? 2 : 1;
    default:
      return static_cast<double>((i * 7 + static_cast<std::size_t>(rank) * 3) % 4);
  }
}

double expected_value(DType dtype, ReduceOp op, int ranks, std::size_t i) {
  double result = input_value(op, 0, i);
  if (dtype == DType::kBool) {
    bool any = false;
    bool all = true;
    for (int rank = 0; rank < ranks; ++rank) {
      any |= input_value(op, rank, i) != 0;
      all &= input_value(op, rank, i) != 0;
    }
    return op == ReduceOp::kSum || op == ReduceOp::kMax ? any : all;
  }
  for (int rank = 1; rank < ranks; ++rank) {
    const double value = input_value(op, rank, i);
    if (op == ReduceOp::kMin) result = std::min(result, value);
    if (op == ReduceOp::kMax) result = std::max(result, value);
    if (op == ReduceOp::kProduct) result *= value;
    if (op == ReduceOp::kSum || op == ReduceOp::kAverage) result += value;
  }
  return op == ReduceOp::kAverage ? result / ranks : result;
}

// The period with which the elements of inputs and results repeat.
constexpr std::size_t kPeriod = 20;

Bytes input_of(DType dtype, ReduceOp op, int rank, std::size_t count) {
  return make_array(dtype, count, kPeriod, [&](std::size_t i) { return input_value(op, rank, i); });
}

// `count` elements of the result, beginning with element `first`.
Bytes result_of(DType dtype, ReduceOp op, int ranks, std::size_t count, std::size_t first = 0) {
  return make_array(dtype, count, kPeriod,
                    [&](std::size_t i) { return expected_value(dtype, op, ranks, first + i); });
}

// Alternating zeros and ones.
Bytes zeros_and_ones(DType dtype, std::size_t count, std::size_t first) {
  return make_array(dtype, count, 2, [&](std::size_t i) { return (first + i) % 2; });
}

void append(Bytes& to, const Bytes& more) { to.insert(to.end(), more.begin(), more.end()); }

void check(const std::string& difference, const std::string& what) {
  if (!difference.empty()) throw std::runtime_error(what + ": " + difference);
}

void check_allreduce(Engine& engine, int rank, DType dtype, ReduceOp op, std::size_t count,
                     bool in_place) {
  auto input = input_of(dtype, op, rank, count);
  Bytes output(in_place ? 0 : input.size());
  Order request;
  request.dtype = dtype;
  request.reduce = op;
  request.shape = {static_cast<std::int64_t>(count)};
  request.input = input.data();
  request.output = in_place ? input.data() : output.data();
  const auto result = perform(engine, request);
  const std::string what = std::string("allreduce ") + reduce_op_name(op) + " " +
                           dtype_name(dtype) + " x " + std::to_string(count);
  check(difference(dtype, result, result_of(dtype, op, engine.size(), count)), what);
}

void check_broadcast(Engine& engine, int rank, DType dtype, int root, std::size_t count) {
  auto data = zeros_and_ones(dtype, count, static_cast<std::size_t>(rank));
  Order request;
  request.op = OpKind::kBroadcast;
  request.dtype = dtype;
  request.root = root;
  request.shape = {static_cast<std::int64_t>(count)};
  request.input = data.data();
  request.output = data.data();
  const auto result = perform(engine, request);
  check(difference(dtype, result, zeros_and_ones(dtype, count, static_cast<std::size_t>(root))),
        std::string("broadcast ") + dtype_name(dtype) + " x " + std::to_string(count) + " from " +
            std::to_string(root));
}

// Rank r contributes (r * 5 + salt) % 7 times `unit` rows of two columns.
void check_allgather(Engine& engine, int rank, DType dtype, std::size_t salt, std::size_t unit) {
  const auto rows_of_rank = [&](int r) {
    return (static_cast<std::size_t>(r) * 5 + salt) % 7 * unit;
  };
  const auto input_of_rank = [&](int r) {
    return zeros_and_ones(dtype, rows_of_rank(r) * 2, static_cast<std::size_t>(r));
  };
  const Bytes input = input_of_rank(rank);
  Order request;
  request.op = OpKind::kAllgather;
  request.dtype = dtype;
  request.shape = {static_cast<std::int64_t>(rows_of_rank(rank)), 2};
  request.input = input.data();
  const auto result = perform(engine, request);
  Bytes expected;
  for (int r = 0; r < engine.size(); ++r) append(expected, input_of_rank(r));
  check(difference(dtype, result, expected), std::string("allgather ") + dtype_name(dtype));
}

// Rank a sends (a * 3 + b * 5 + salt) % 6 times `unit` rows to rank b.
void check_alltoall(Engine& engine, int rank, DType dtype, std::size_t salt, std::size_t unit) {
  const auto rows_between = [&](int a, int b) {
    return (static_cast<std::size_t>(a) * 3 + static_cast<std::size_t>(b) * 5 + salt) % 6 * unit;
  };
  const auto rows_of_pair = [&](int a, int b) {
    return zeros_and_ones(dtype, rows_between(a, b),
                          static_cast<std::size_t>(a) + static_cast<std::size_t>(b));
  };
  Order request;
  Bytes input;
  Bytes expected;
  for (int peer = 0; peer < engine.size(); ++peer) {
    request.splits.push_back(static_cast<std::int64_t>(rows_between(rank, peer)));
    append(input, rows_of_pair(rank, peer));
    append(expected, rows_of_pair(peer, rank));
  }
  request.op = OpKind::kAlltoall;
  request.dtype = dtype;
  request.shape = {static_cast<std::int64_t>(input.size() / dtype_size(dtype))};
  request.input = input.data();
  const auto result = perform(engine, request);
  check(difference(dtype, result, expected), std::string("alltoall ") + dtype_name(dtype));
}

void check_reducescatter(Engine& engine, int rank, DType dtype, ReduceOp op, std::size_t rows,
                         std::size_t columns) {
  const auto ranks = static_cast<std::size_t>(engine.size());
  const auto me = static_cast<std::size_t>(rank);
  const Bytes input = input_of(dtype, op, rank, rows * columns);
  Order request;
  request.op = OpKind::kReducescatter;
  request.dtype = dtype;
  request.reduce = op;
  request.shape = {static_cast<std::int64_t>(rows), static_cast<std::int64_t>(columns)};
  request.input = input.data();
  const auto result = perform(engine, request);
  const std::size_t mine = rows / ranks + (me < rows % ranks ? 1 : 0);
  const std::size_t before = me * (rows / ranks) + std::min(me, rows % ranks);
  check(difference(dtype, result,
                   result_of(dtype, op, engine.size(), mine * columns, before * columns)),
        std::string("reducescatter ") + reduce_op_name(op) + " " + dtype_name(dtype) + " rows " +
            std::to_string(rows));
}

// Sums of at most eight ones are exact in 8-bit floats, and so are their averages.
void check_float8(Engine& engine, int rank, DType dtype, std::size_t count) {
  const int ranks = engine.size();
  const auto ones = [&](int of_rank, std::size_t i) {
    return (i + static_cast<std::size_t>(of_rank)) % 2 == 0 ? 1.0 : 0.0;
  };
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}) {
    auto input = make_array(dtype, count, [&](std::size_t i) { return ones(rank, i); });
    Bytes output(input.size());
    Order request;
    request.dtype = dtype;
    request.reduce = op;
    request.shape = {static_cast<std::int64_t>(count)};
    request.input = input.data();
    request.output = output.data();
    perform(engine, request);
    const Bytes expected = make_array(dtype, count, [&](std::size_t i) {
      double result = ones(0, i);
      for (int other = 1; other < ranks; ++other) {
        const double value = ones(other, i);
        result = op == ReduceOp::kSum   ? result + value
                 : op == ReduceOp::kMin ? std::min(result, value)
                 : op == ReduceOp::kMax ? std::max(result, value)
                                        : result * value;
      }
      return result;
    });
    check(difference(dtype, output, expected),
          std::string("allreduce ") + reduce_op_name(op) + " " + dtype_name(dtype));
  }
}

void run_grid(Cluster& cluster, Transport transport) {
  cluster.run([&](int rank) {
    Engine& engine = cluster.engine(rank);
    for (const DType dtype : kDTypes) {
      for (const ReduceOp op : kOps) {
        if (!has_reduction(op, dtype)) continue;
        // More ranks than processors make this slow. With more than two ranks, each transport and
        // each number of ranks tests another third of the combinations.
        const int part = static_cast<int>(op) + static_cast<int>(dtype) +
                         static_cast<int>(transport) + engine.size();
        if (engine.size() > 2 && part % 3 != 0) continue;
        for (const std::size_t count : kSmallCounts) {
          check_allreduce(engine, rank, dtype, op, count, count % 2 == 0);
        }
        for (const std::size_t rows : {0, 1, 13}) {
          check_reducescatter(engine, rank, dtype, op, rows, 3);
        }
      }
      for (int root = 0; root < engine.size(); root += 2) {
        for (const std::size_t count : {0, 1, 1025}) {
          check_broadcast(engine, rank, dtype, root, count);
        }
      }
      for (const std::size_t salt : {0, 1, 4}) {
        check_allgather(engine, rank, dtype, salt, 3);
        check_alltoall(engine, rank, dtype, salt, 5);
      }
    }
    for (const DType dtype : {DType::kFloat8E4M3FN, DType::kFloat8E5M2}) {
      for (const std::size_t count : {1, 1025, 9001}) check_float8(engine, rank, dtype, count);
      check_broadcast(engine, rank, dtype, 0, 1025);
      check_allgather(engine, rank, dtype, 1, 3);
      check_alltoall(engine, rank, dtype, 1, 5);
    }
    Order barrier;
    barrier.op = OpKind::kBarrier;
    perform(engine, barrier);
  });
}

void run_large(Cluster& cluster) {
  cluster.run([&](int rank) {
    Engine& engine = cluster.engine(rank);
    for (const DType dtype : {DType::kUInt8, DType::kFloat16, DType::kFloat32, DType::kFloat64}) {
      if (kSlowedDown && dtype != DType::kFloat16) continue;
      for (const std::size_t count : kLargeCounts) {
        check_allreduce(engine, rank, dtype, ReduceOp::kSum, count, true);
        check_allreduce(engine, rank, dtype, ReduceOp::kAverage, count, false);
        check_broadcast(engine, rank, dtype, engine.size() - 1, count);
      }
      check_allgather(engine, rank, dtype, 2, 40'001);
      check_alltoall(engine, rank, dtype, 1, 70'001);
      check_reducescatter(engine, rank, dtype, ReduceOp::kSum, 50'003, 7);
    }
  });
}

}  // namespace

TEST_CASE("all operations, dtypes and reductions give correct results on 1 to 8 ranks") {
  for (const Transport transport : kTransports) {
    for (const int ranks : kSizes) {
      CAPTURE(transport_name(transport));
      CAPTURE(ranks);
      Cluster cluster(transport, ranks);
      CHECK_NOTHROW(run_grid(cluster, transport));
    }
  }
}

TEST_CASE("operations on large tensors give correct results on every transport") {
  for (const Transport transport : kTransports) {
    for (const int ranks : {2, 3, 5}) {
      if (kSlowedDown && ranks != 3) continue;
      CAPTURE(transport_name(transport));
      CAPTURE(ranks);
      Cluster cluster(transport, ranks);
      CHECK_NOTHROW(run_large(cluster));
    }
  }
}

namespace {

void check_rooted(Engine& engine, int rank, OpKind kind, std::size_t unit) {
  const int root = engine.size() - 1;
  const auto rows_of_rank = [&](int r) { return static_cast<std::size_t>(r + 1) * unit; };
  Order request;
  request.op = kind;
  request.dtype = DType::kInt32;
  request.root = root;
  Bytes input, expected;
  if (kind == OpKind::kReduce) {
    input = input_of(request.dtype, ReduceOp::kSum, rank, unit);
    expected = rank == root ? result_of(request.dtype, ReduceOp::kSum, engine.size(), unit) : input;
  } else if (kind == OpKind::kGather) {
    const auto part = [&](int r) { return zeros_and_ones(request.dtype, rows_of_rank(r), r % 2); };
    input = part(rank);
    for (int r = 0; rank == root && r < engine.size(); ++r) append(expected, part(r));
  } else {
    for (int r = 0; r < engine.size(); ++r) {
      append(input, zeros_and_ones(request.dtype, rows_of_rank(r), r % 2));
      request.splits.push_back(static_cast<std::int64_t>(rows_of_rank(r)));
    }
    expected = zeros_and_ones(request.dtype, rows_of_rank(rank), rank % 2);
  }
  Bytes output(kind == OpKind::kReduce ? input.size() : 0);
  request.shape = {static_cast<std::int64_t>(input.size() / dtype_size(request.dtype))};
  request.input = input.data();
  request.output = output.empty() ? nullptr : output.data();
  check(difference(request.dtype, perform(engine, request), expected),
        std::string(op_kind_name(kind)) + " in units of " + std::to_string(unit));
}

// Adasum of equal tensors is that tensor.
void check_adasum_of_equal(Engine& engine, std::size_t count) {
  const Bytes input = input_of(DType::kFloat32, ReduceOp::kSum, 0, count);
  Bytes output(input.size());
  Order request;
  request.reduce = ReduceOp::kAdasum;
  request.shape = {static_cast<std::int64_t>(count)};
  request.input = input.data();
  request.output = output.data();
  check(difference(DType::kFloat32, perform(engine, request), input), "Adasum of equal tensors");
}

// What is run with an algorithm of this operation.
void check_operation(Engine& engine, int rank, const Algorithm& algorithm) {
  switch (algorithm.kind) {
    case OpKind::kAllreduce:
      for (const std::size_t count : kForcedCounts) {
        // The largest takes several blocks. Three and six ranks suffice for these.
        if (count > 1'000'000 && engine.size() % 3 != 0) continue;
        if (std::string(algorithm.name).starts_with("adasum")) {
          check_adasum_of_equal(engine, count);
          continue;
        }
        check_allreduce(engine, rank, DType::kFloat32, ReduceOp::kSum, count, true);
        check_allreduce(engine, rank, DType::kBFloat16, ReduceOp::kAverage, count, false);
      }
      break;
    case OpKind::kBroadcast:
      for (const std::size_t count : kForcedCounts) {
        if (count > 1'000'000 && engine.size() % 3 != 0) continue;
        check_broadcast(engine, rank, DType::kInt32, 1, count);
      }
      break;
    case OpKind::kAllgather:
      for (const std::size_t salt : {0, 3, 5}) {
        for (const std::size_t unit : kGatheredUnits) {
          check_allgather(engine, rank, DType::kFloat64, salt, unit);
        }
      }
      break;
    case OpKind::kReducescatter:
      for (const std::size_t rows : kScatteredRows) {
        check_reducescatter(engine, rank, DType::kFloat32, ReduceOp::kAverage, rows, 3);
        check_reducescatter(engine, rank, DType::kBFloat16, ReduceOp::kSum, rows, 1);
      }
      break;
    case OpKind::kAlltoall:
      for (const std::size_t unit : kGatheredUnits) {
        check_alltoall(engine, rank, DType::kFloat64, 1, unit);
      }
      break;
    case OpKind::kBarrier: {
      Order barrier;
      barrier.op = OpKind::kBarrier;
      perform(engine, barrier);
      break;
    }
    default:
      for (const std::size_t unit : kGatheredUnits) {
        check_rooted(engine, rank, algorithm.kind, unit);
      }
  }
}

// Where an algorithm can run.
std::vector<Transport> transports_of(const std::string& medium) {
  if (medium == "shm") return {Transport::kShm, Transport::kThreads};
  if (medium == "stream") return {Transport::kShm, Transport::kTcp, Transport::kMixed};
  return {Transport::kMixed};
}

std::vector<int> ranks_of(const Algorithm& algorithm) {
  if (std::string(algorithm.name).starts_with("adasum")) return {4};
  std::vector<int> ranks(std::begin(kForcedRanks), std::end(kForcedRanks));
  // Of two ranks, each has a host of its own.
  if (std::string(algorithm.medium) == "mixed") std::erase(ranks, 2);
  return ranks;
}

}  // namespace

TEST_CASE("every algorithm of the registry gives correct results where it is forced, and runs") {
  for (const Algorithm& algorithm : algorithms()) {
    const std::string medium = algorithm.medium;
    // MPI's collectives and process sets of one rank have tests of their own, and so have GPUs.
    if (algorithm.on_gpu || medium == "mpi" || medium == "self") continue;
    const std::string row = AlgorithmsRun::describe(algorithm);
    CAPTURE(row);
    for (const Transport transport : transports_of(medium)) {
      for (const int ranks : ranks_of(algorithm)) {
        CAPTURE(transport_name(transport));
        CAPTURE(ranks);
        Cluster cluster(transport, ranks, options_forcing(algorithm.name));
        AlgorithmsRun run(cluster.engine(0));
        CHECK_NOTHROW(
            cluster.run([&](int rank) { check_operation(cluster.engine(rank), rank, algorithm); }));
        const bool ran = run.take().contains(row);
        CHECK(ran);
      }
    }
  }
}

TEST_CASE("a forced algorithm that the registry does not have is noticed") {
  CHECK_THROWS_AS(options_forcing("rnig"), std::invalid_argument);
}

TEST_CASE("small allgathers of one burst share exchanges") {
  for (const Transport transport : kTransports) {
    for (const int ranks : {2, 5}) {
      CAPTURE(transport_name(transport));
      CAPTURE(ranks);
      Cluster cluster(transport, ranks);
      CHECK_NOTHROW(cluster.run([&](int rank) {
        Engine& engine = cluster.engine(rank);
        const auto rows_of = [](int of_rank, std::size_t tensor) {
          return (static_cast<std::size_t>(of_rank) * 3 + tensor) % 4 *
                 (tensor == 2 ? std::size_t{20'000} : std::size_t{1});
        };
        const auto input_of = [&](int of_rank, std::size_t tensor) {
          return zeros_and_ones(DType::kInt32, rows_of(of_rank, tensor),
                                static_cast<std::size_t>(of_rank) + tensor);
        };
        // Tensors of one operation share a batch. A large one is between small ones.
        constexpr std::size_t kTensors = 6;
        std::vector<Bytes> inputs;
        std::vector<std::int64_t> rows;
        std::vector<hp_tensor> tensors;
        for (std::size_t i = 0; i < kTensors; ++i) {
          inputs.push_back(input_of(rank, i));
          inputs.back().reserve(1);  // an empty tensor has an address
          rows.push_back(static_cast<std::int64_t>(rows_of(rank, i)));
        }
        for (std::size_t i = 0; i < kTensors; ++i) {
          tensors.push_back({inputs[i].data(), nullptr, &rows[i], 1, 0});
        }
        hp_submission submission{};
        submission.struct_size = sizeof submission;
        submission.op = HP_ALLGATHER;
        submission.dtype = HP_INT32;
        submission.device = -1;
        submission.tensors = tensors.data();
        submission.tensor_count = static_cast<std::int32_t>(tensors.size());
        const hp_handle handle = engine.submit(make_operation(submission, engine.members(0)));
        await(engine, handle);
        const auto operation = engine.handles().done(handle);
        for (std::size_t i = 0; i < kTensors; ++i) {
          Bytes expected;
          for (int of_rank = 0; of_rank < engine.size(); ++of_rank) {
            append(expected, input_of(of_rank, i));
            if (operation->outcomes[i].row_counts[static_cast<std::size_t>(of_rank)] !=
                static_cast<std::int64_t>(rows_of(of_rank, i))) {
              throw std::runtime_error("wrong row count");
            }
          }
          const auto* const data = static_cast<const std::byte*>(operation->outcomes[i].data);
          check(
              difference(DType::kInt32, Bytes(data, data + operation->outcomes[i].bytes), expected),
              "tensor " + std::to_string(i));
        }
        engine.handles().release(handle);
      }));
    }
  }
}

TEST_CASE("large tensors give correct results over several lanes between two hosts") {
  for (const Transport transport :
       {Transport::kInproc, Transport::kTcp, Transport::kMixed, Transport::kPolled}) {
    for (const int ranks : kLaneRanks) {
      CAPTURE(transport_name(transport));
      CAPTURE(ranks);
      Cluster cluster(transport, ranks, test_options(), 3);
      CHECK_NOTHROW(run_large(cluster));
    }
  }
}

TEST_CASE("process sets that span hosts reduce within each host first") {
  // There are two hosts with four ranks each. Sets have equally or differently many ranks on them.
  for (const std::vector<int>& members : {std::vector<int>{0, 1, 2, 3},
                                          {0, 3, 4, 7},
                                          {0, 1, 2},
                                          {0, 2, 4},
                                          {1, 2, 4, 5, 6, 7},
                                          {0, 2, 4, 6, 7}}) {
    Cluster cluster(Transport::kMixed, 8, options_forcing("hierarchical"), 2);
    cluster.run([&](int rank) {
      Engine& engine = cluster.engine(rank);
      const auto set = static_cast<std::uint32_t>(await_value(engine, engine.add_set(members)));
      if (std::find(members.begin(), members.end(), rank) != members.end()) {
        // The largest one takes several blocks.
        for (const std::size_t count : {std::size_t{3}, std::size_t{700'001}, kSeveralBlocks}) {
          auto data = make_array(DType::kFloat32, count, 9,
                                 [&](std::size_t i) { return static_cast<double>(i % 9) + rank; });
          Order request;
          request.set = set;
          request.shape = {static_cast<std::int64_t>(count)};
          request.input = request.output = data.data();
          const double ranks = std::accumulate(members.begin(), members.end(), 0.0);
          const auto size = static_cast<double>(members.size());
          const Bytes expected = make_array(DType::kFloat32, count, 9, [&](std::size_t i) {
            return size * static_cast<double>(i % 9) + ranks;
          });
          check(difference(DType::kFloat32, perform(engine, request), expected), "sum in a set");
        }
      }
      await(engine, engine.remove_set(set));
    });
  }
}

TEST_CASE("results have the same bits on every rank and in every run") {
  constexpr int kFive = 5;
  constexpr std::size_t kRandoms = 4099;  // the number of distinct random values in an input
  std::mt19937_64 random(test_seed());
  std::normal_distribution<double> normal;
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    for (const std::size_t count : {std::size_t{5}, std::size_t{3001}, kLargeCounts[1]}) {
      if (kSlowedDown && count == kLargeCounts[1] && dtype != DType::kFloat16) continue;
      std::vector<Bytes> inputs;
      std::vector<double> exact(std::min(count, kRandoms), 0);
      for (int rank = 0; rank < kFive; ++rank) {
        inputs.push_back(
            make_array(dtype, count, kRandoms, [&](std::size_t) { return normal(random); }));
        for (std::size_t i = 0; i < exact.size(); ++i) {
          exact[i] += get_element(dtype, inputs.back().data() + i * dtype_size(dtype));
        }
      }
      const double tolerance = dtype == DType::kFloat64   ? 1e-13
                               : dtype == DType::kFloat32 ? 1e-5
                               : dtype == DType::kFloat16 ? 2e-2
                                                          : 2e-1;
      for (const Transport transport : kTransports) {
        CAPTURE(transport_name(transport));
        CAPTURE(dtype_name(dtype));
        CAPTURE(count);
        std::vector<Bytes> results;
        for (int run = 0; run < 2; ++run) {
          std::vector<Bytes> of_run(kFive);
          Cluster cluster(transport, kFive);
          cluster.run([&](int rank) {
            const auto me = static_cast<std::size_t>(rank);
            Bytes output(inputs[me].size());
            Order request;
            request.dtype = dtype;
            request.shape = {static_cast<std::int64_t>(count)};
            request.input = inputs[me].data();
            request.output = output.data();
            of_run[me] = perform(cluster.engine(rank), request);
          });
          results.insert(results.end(), of_run.begin(), of_run.end());
        }
        for (const Bytes& result : results) {
          CHECK(difference(dtype, result, results.front()).empty());
        }
        double worst = 0;
        for (std::size_t i = 0; i < count; ++i) {
          const double got = get_element(dtype, results.front().data() + i * dtype_size(dtype));
          worst = std::max(worst, std::abs(got - exact[i % kRandoms]));
        }
        CHECK(worst < tolerance);
      }
    }
  }
}

TEST_CASE("16-bit floats are summed in float32 within a host") {
  // 2049 is not representable in float16: adding single ones to 2048 in float16 would lose all of
  // them.
  for (const Transport transport : {Transport::kThreads, Transport::kShm}) {
    for (const std::size_t count : {std::size_t{8}, std::size_t{100'000}}) {
      Cluster cluster(transport, 5);
      cluster.run([&](int rank) {
        auto data = make_array(DType::kFloat16, count, 1,
                               [&](std::size_t) { return rank == 0 ? 2048 : 1; });
        Order request;
        request.dtype = DType::kFloat16;
        request.shape = {static_cast<std::int64_t>(count)};
        request.input = request.output = data.data();
        const auto result = perform(cluster.engine(rank), request);
        const Bytes expected = make_array(DType::kFloat16, count, 1, [](auto) { return 2052; });
        check(difference(DType::kFloat16, result, expected), "sum");
      });
    }
  }
}

TEST_CASE("scale factors are applied before and after the reduction") {
  for (const Transport transport : kTransports) {
    Cluster cluster(transport, 3);
    cluster.run([&](int rank) {
      for (const std::size_t count : {std::size_t{3}, std::size_t{5000}}) {
        auto data = make_array(DType::kFloat32, count, [&](std::size_t i) { return i % 9 + rank; });
        Order request;
        request.dtype = DType::kFloat32;
        request.shape = {static_cast<std::int64_t>(count)};
        request.input = request.output = data.data();
        request.prescale = 0.5;
        request.postscale = 4;
        const auto result = perform(cluster.engine(rank), request);
        const Bytes expected = make_array(
            DType::kFloat32, count, [](std::size_t i) { return 4 * 0.5 * (3 * (i % 9) + 3); });
        check(difference(DType::kFloat32, result, expected), "scaled sum");
      }
    });
  }
}

TEST_CASE("fused tensors of random sizes that cross the borders of chunks and slots are reduced") {
  // Tensors alternate between in place and out of place. A group is one batch.
  std::mt19937_64 random(test_seed());
  for (const Transport transport : {Transport::kThreads, Transport::kShm}) {
    for (const int ranks : {2, 3, 4}) {
      CAPTURE(transport_name(transport));
      CAPTURE(ranks);
      Cluster cluster(transport, ranks);
      for (const std::size_t most : {std::size_t{600}, std::size_t{9'000}, std::size_t{300'000}}) {
        std::vector<std::vector<std::int64_t>> shapes(1 + random() % 6);
        for (auto& shape : shapes) shape = {static_cast<std::int64_t>(random() % most)};
        const double prescale = random() % 2 == 0 ? 1 : 0.5;
        CHECK_NOTHROW(cluster.run([&](int rank) {
          std::vector<std::vector<std::byte>> inputs, outputs;
          std::vector<hp_tensor> tensors;
          for (std::size_t k = 0; k < shapes.size(); ++k) {
            inputs.push_back(make_array(
                DType::kFloat32, static_cast<std::size_t>(shapes[k][0]), 64,
                [&](std::size_t i) { return static_cast<double>((i + k) % 64) + 2 * rank; }));
            outputs.emplace_back(k % 2 == 0 ? inputs.back().size() : 0);
          }
          for (std::size_t k = 0; k < shapes.size(); ++k) {
            void* const output = k % 2 == 0 ? outputs[k].data() : inputs[k].data();
            tensors.push_back({inputs[k].data(), output, shapes[k].data(), 1, 0});
          }
          hp_submission submission{};
          submission.struct_size = sizeof submission;
          submission.dtype = HP_FLOAT32;
          submission.reduce_op = HP_AVERAGE;
          submission.device = -1;
          submission.prescale = prescale;
          submission.tensors = tensors.data();
          submission.tensor_count = static_cast<std::int32_t>(tensors.size());
          Engine& engine = cluster.engine(rank);
          const hp_handle handle = engine.submit(make_operation(submission, engine.members(0)));
          await(engine, handle);
          engine.handles().release(handle);
          for (std::size_t k = 0; k < shapes.size(); ++k) {
            const Bytes expected = make_array(
                DType::kFloat32, static_cast<std::size_t>(shapes[k][0]), 64, [&](std::size_t i) {
                  return prescale * (static_cast<double>((i + k) % 64) + engine.size() - 1);
                });
            check(difference(DType::kFloat32, k % 2 == 0 ? outputs[k] : inputs[k], expected),
                  "tensor " + std::to_string(k));
          }
        }));
      }
    }
  }
}
