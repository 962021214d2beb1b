// Tests of whole engines with tensors on simulated GPUs: the results equal those on the CPU, the
// host does not wait for streams, and failures are reported with their cause.
#include <doctest/doctest.h>

#include <barrier>
#include <chrono>
#include <numeric>
#include <random>
#include <thread>

#include "tests/harness/elements.h"
#include "tests/harness/gpu_job.h"
#include "tests/harness/random_elements.h"
#include "tests/harness/slowed_down.h"

using namespace horoplug;
using namespace horoplug::testing;

namespace {

using Bytes = std::vector<std::byte>;
using Random = std::mt19937_64;

constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat64,
                             DType::kInt32,   DType::kUInt8,   DType::kInt16,    DType::kInt64};
constexpr OpKind kOps[] = {OpKind::kAllreduce, OpKind::kBroadcast,     OpKind::kAllgather,
                           OpKind::kAlltoall,  OpKind::kReducescatter, OpKind::kReduce,
                           OpKind::kGather,    OpKind::kScatter};

int below_limit(Random& random, int limit) {
  return static_cast<int>(random() % static_cast<unsigned>(limit));
}

// An operation with the input of each rank.
struct Given {
  Order order;  // without shape and splits, which can differ between ranks
  std::vector<std::vector<std::int64_t>> shapes, splits;
  std::vector<Bytes> inputs;
  bool in_place;
};

Given random_operation(Random& random, int ranks, int number, bool exact) {
  Given given;
  Order& order = given.order;
  order.name = "t" + std::to_string(number);
  order.op = kOps[below_limit(random, std::size(kOps))];
  order.dtype = kDTypes[below_limit(random, std::size(kDTypes))];
  constexpr ReduceOp kReductions[] = {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin,
                                      ReduceOp::kMax, ReduceOp::kProduct};
  order.reduce = kReductions[below_limit(random, std::size(kReductions))];
  order.root = below_limit(random, ranks);
  const bool reduces = operation_info(order.op).reduces;
  if (order.op == OpKind::kAllreduce && below_limit(random, 3) == 0) {
    order.dtype = DType::kFloat32;
    order.compressed = below_limit(random, 2) == 0 ? DType::kFloat16 : DType::kBFloat16;
    if (exact && order.reduce == ReduceOp::kAverage) order.reduce = ReduceOp::kSum;
  }
  // The CPU rounds the scaled result to 16 bits before it widens it. A GPU that scales while it
  // widens does not round in between. It does so if no GPU kernel of ours reduces: with NCCL and on
  // one rank.
  const bool finishes = !(order.compressed && ranks == 1);
  if (reduces && below_limit(random, 3) == 0) order.prescale = 0.5;
  if (reduces && below_limit(random, 3) == 0 && finishes) order.postscale = 3;
  given.in_place = below_limit(random, 2) == 0;
  const bool own_rows = operation_info(order.op).rows_differ && order.op != OpKind::kScatter;
  const std::int64_t rows = below_limit(random, 40), row = 1 + below_limit(random, 300);
  for (int rank = 0; rank < ranks; ++rank) {
    std::vector<std::int64_t> splits;
    std::int64_t own = own_rows ? below_limit(random, 40) : rows;
    if (order.op == OpKind::kAlltoall) {
      for (int to = 0; to < ranks; ++to) splits.push_back(below_limit(random, 12));
      own = std::accumulate(splits.begin(), splits.end(), std::int64_t{0});
    }
    given.shapes.push_back({own, row});
    given.splits.push_back(splits);
    const auto count = static_cast<std::size_t>(own * row);
    Bytes input(count * dtype_size(order.dtype));
    fill(order.dtype, input.data(), count, random);
    if (exact) {
      input =
          make_array(order.dtype, count, [&](std::size_t) { return 1 + below_limit(random, 2); });
    }
    given.inputs.push_back(std::move(input));
  }
  return given;
}

Order order_of(const Given& given, int rank) {
  Order order = given.order;
  order.shape = given.shapes[static_cast<std::size_t>(rank)];
  order.splits = given.splits[static_cast<std::size_t>(rank)];
  return order;
}

Bytes on_cpu(Engine& engine, const Given& given, int rank) {
  Order order = order_of(given, rank);
  order.name += ".cpu";
  const Bytes& input = given.inputs[static_cast<std::size_t>(rank)];
  Bytes output(input.size());
  const std::byte nothing{};
  order.input = input.empty() ? &nothing : input.data();
  const bool has_output = operation_info(order.op).output == OpOutput::kSubmitted;
  if (has_output) order.output = output.data();
  return perform(engine, order);
}

// Runs random operations with random elements, or, if `exact`, with numbers whose sums and products
// are exact in any order.
void random_operations(GpuJob& job, int count, bool exact) {
  Random random(seed());
  std::vector<Given> all;
  for (int i = 0; i < count; ++i) all.push_back(random_operation(random, job.size(), i, exact));
  job.run([&](int rank) {
    for (const Given& given : all) {
      const Bytes expected = on_cpu(job.engine(rank), given, rank);
      const auto me = static_cast<std::size_t>(rank);
      const Bytes result =
          job.perform(rank, order_of(given, rank), given.inputs[me], given.in_place);
      INFO("seed " << seed() << ": rank " << rank << ", " << op_kind_name(given.order.op) << " "
                   << dtype_name(given.order.dtype) << " " << reduce_op_name(given.order.reduce)
                   << " " << given.order.name);
      const bool equal = result == expected;
      CHECK(equal);
    }
  });
}

EngineOptions with_algorithm(const char* name) {
  EngineOptions options = test_options();
  options.algorithm = name;
  return options;
}

Bytes floats(std::size_t count, float value) {
  Bytes bytes(count * sizeof(float));
  for (std::size_t i = 0; i < count; ++i)
    std::memcpy(bytes.data() + i * sizeof value, &value, sizeof value);
  return bytes;
}

Order sum_of(const std::string& name, std::size_t count) {
  Order order;
  order.name = name;
  order.shape = {static_cast<std::int64_t>(count)};
  return order;
}

}  // namespace

TEST_CASE("every operation gives the same results on GPUs as on CPUs") {
  for (const Transport transport : {Transport::kThreads, Transport::kMixed}) {
    for (const int ranks : {1, 2, 3, 4}) {
      CAPTURE(transport_name(transport));
      CAPTURE(ranks);
      // The hierarchical algorithm adds in another order, so sums of four ranks would have other
      // bits.
      const char* const name = transport == Transport::kMixed ? "staged" : "";
      GpuJob job({.transport = transport, .ranks = ranks, .engine = with_algorithm(name)});
      random_operations(job, kSlowedDown ? 6 : 20, false);
    }
  }
}

TEST_CASE("buffers of several chunks and windows are staged through host memory") {
  GpuJob job({.ranks = 2, .engine = with_algorithm("staged")});
  const std::size_t count = ((kSlowedDown ? 36 : 70) << 20) / sizeof(float) + 5;
  job.run([&](int rank) {
    const Bytes result = job.perform(rank, sum_of("large", count),
                                     floats(count, static_cast<float>(rank + 1)), true);
    const bool equal = result == floats(count, 3);
    CHECK(equal);
  });
}

TEST_CASE("concurrent operations are fused, run in plans, and give correct results") {
  GpuJob job({.ranks = 2});
  constexpr int kTensors = 12, kSteps = 10;
  job.run([&](int rank) {
    Framework& framework = job.framework(rank);
    Engine& engine = job.engine(rank);
    std::vector<std::unique_ptr<Framework::Array>> arrays;
    for (int i = 0; i < kTensors; ++i) {
      arrays.push_back(std::make_unique<Framework::Array>(framework, 4 * (100 + 7 * i)));
    }
    for (int step = 0; step < kSteps; ++step) {
      std::vector<hp_handle> handles;
      for (int i = 0; i < kTensors; ++i) {
        Framework::Array& array = *arrays[static_cast<std::size_t>(i)];
        array.write(floats(100 + 7 * i, static_cast<float>(rank + step + i)));
        Order order = sum_of("t" + std::to_string(i), 100 + 7 * i);
        order.reduce = ReduceOp::kAverage;
        order.input = order.output = array.address();
        order.device = framework.device();
        order.stream = framework.stream();
        handles.push_back(submit(engine, order));
      }
      for (const hp_handle handle : handles) {
        await(engine, handle);
        RankGpu::make_stream_wait(*engine.handles().done(handle), framework.stream());
        engine.handles().release(handle);
      }
      for (int i = 0; i < kTensors; ++i) {
        const bool equal = arrays[static_cast<std::size_t>(i)]->read() ==
                           floats(100 + 7 * i, static_cast<float>(step + i) + 0.5f);
        CHECK(equal);
      }
    }
    CHECK(engine.stats().planned_batches > 0);
  });
}

TEST_CASE("the driver is not called before the peers have the root's decision to pause a plan") {
  // Another dtype needs another kernel. The driver loads it when rank 0's GPU has received rank 1's
  // data, for which rank 1 has to know the decision.
  GpuJob job({.ranks = 2, .engine = with_algorithm("ipc")});
  for (const DType other : {DType::kInt32, DType::kFloat64, DType::kInt16, DType::kUInt8}) {
    CAPTURE(dtype_name(other));
    job.run([&](int rank) {
      Engine& engine = job.engine(rank);
      const std::uint64_t before = engine.stats().planned_batches;
      for (int step = 0; step < 10; ++step) job.perform(rank, sum_of("planned", 10), floats(10, 1));
      CHECK(engine.stats().planned_batches > before);
      Order beside = sum_of("beside the plan", 10);
      beside.dtype = other;
      const Bytes ones = make_array(other, 10, [](std::size_t) { return 1; });
      const Bytes twos = make_array(other, 10, [](std::size_t) { return 2; });
      CHECK(job.perform(rank, beside, ones) == twos);
    });
  }
}

TEST_CASE("an operation does not make the host wait for the GPU") {
  GpuJob job({.ranks = 2});
  // Returns the number of host waits.
  const auto step = [&](const std::string& name) {
    const std::size_t before = job.gpu().host_waits();
    job.run([&](int rank) {
      Framework& framework = job.framework(rank);
      Engine& engine = job.engine(rank);
      Framework::Array array(framework, 4000);
      array.write(floats(1000, 1));
      if (!name.empty()) {
        Order order = sum_of(name, 1000);
        order.input = order.output = array.address();
        order.device = framework.device();
        order.stream = framework.stream();
        const hp_handle handle = submit(engine, order);
        await(engine, handle);
        RankGpu::make_stream_wait(*engine.handles().done(handle), framework.stream());
        engine.handles().release(handle);
      }
      array.read();
    });
    return job.gpu().host_waits() - before;
  };
  step("the first one allocates");
  const std::size_t without = step("");
  CHECK(step("another") == without);
}

TEST_CASE("tensors on the CPU of one rank and the GPU of another are a mismatch error") {
  GpuJob job({.ranks = 2});
  job.run([&](int rank) {
    const Status status = failure_of([&] {
      if (rank == 0) {
        job.perform(0, sum_of("t", 4), floats(4, 1));
      } else {
        Bytes data = floats(4, 1);
        Order order = sum_of("t", 4);
        order.input = order.output = data.data();
        perform(job.engine(1), order);
      }
    });
    CHECK(status.code == HP_MISMATCH);
    CHECK(mentions(status, {"'t'", "device", "GPU on rank 0", "CPU on rank 1"}));
  });
}

TEST_CASE("a second GPU of one rank and a stream under graph capture are rejected") {
  SimulatedOptions gpus;
  gpus.devices = 2;
  GpuJob job({.ranks = 1, .gpu = gpus});
  job.perform(0, sum_of("first", 4), floats(4, 1));
  Order order = sum_of("second", 4);
  Framework::Array array(job.framework(0), 16);
  order.input = order.output = array.address();
  order.device = 1;
  Status status = failure_of([&] { submit(job.engine(0), order); });
  CHECK(status.code == HP_INVALID_ARGUMENT);
  CHECK(mentions(status, {"cuda:1", "cuda:0", "CUDA_VISIBLE_DEVICES"}));
  job.gpu().set_capture_status(job.framework(0).stream(), 1);
  status = failure_of([&] { job.perform(0, sum_of("third", 4), floats(4, 1)); });
  CHECK(status.code == HP_UNSUPPORTED);
  CHECK(mentions(status, {"graph", "outside of the capture"}));
  job.gpu().set_capture_status(job.framework(0).stream(), 0);
  CHECK(job.perform(0, sum_of("third", 4), floats(4, 1)) == floats(4, 1));
}

TEST_CASE("a joined rank takes part even if it has never submitted a GPU tensor") {
  GpuJob job({.ranks = 3});
  job.run([&](int rank) {
    if (rank < 2) {
      const Bytes result = job.perform(rank, sum_of("t", 1000), floats(1000, 2), rank == 0);
      CHECK((result == floats(1000, 4)));
    }
    await(job.engine(rank), job.engine(rank).join(0));
  });
}

TEST_CASE("the GPU memory of results is freed") {
  auto job = std::make_unique<GpuJob>(GpuJobOptions{.ranks = 2});
  job->run([&](int rank) {
    Order order = sum_of("gathered", 50);
    order.op = OpKind::kAllgather;
    for (int i = 0; i < 5; ++i) CHECK(job->perform(rank, order, floats(50, 1)).size() == 400);
  });
  job->end();
  // The memory is freed in stream order, and the host does not wait for that.
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  for (int device = 0; device < 2; ++device) {
    while (job->gpu().bytes_used(device) != 0 && std::chrono::steady_clock::now() < until) {
      std::this_thread::yield();
    }
    CHECK(job->gpu().bytes_used(device) == 0);
  }
}

TEST_CASE("a copy of a result is ordered in its stream after the operation") {
  constexpr std::size_t kBytes = 4000;
  GpuJob job({.ranks = 2, .has_nccl = true});
  job.run([&](int rank) {
    Framework& framework = job.framework(rank);
    Engine& engine = job.engine(rank);
    Framework::Array input(framework, kBytes), copy(framework, 2 * kBytes);
    for (int i = 0; i < 5; ++i) {
      input.write(floats(kBytes / sizeof(float), static_cast<float>(rank + i)));
      Order order = sum_of("rows" + std::to_string(i), kBytes / sizeof(float));
      order.op = OpKind::kAllgather;
      order.input = input.address();
      order.device = framework.device();
      order.stream = framework.stream();
      const hp_handle handle = submit(engine, order);
      CHECK(failure_of([&] {
              RankGpu::copy_result(*engine.handles().done(handle + 1), 0, copy.address(),
                                   framework.stream());
            }).code == HP_INVALID_ARGUMENT);
      await(engine, handle);
      CHECK(mentions(failure_of([&] {
                       RankGpu::copy_result(*engine.handles().done(handle), 1, copy.address(),
                                            framework.stream());
                     }),
                     {"no tensor 1"}));
      RankGpu::copy_result(*engine.handles().done(handle), 0, copy.address(), framework.stream());
      engine.handles().release(handle);
      Bytes expected = floats(kBytes / sizeof(float), static_cast<float>(i));
      const Bytes second = floats(kBytes / sizeof(float), static_cast<float>(1 + i));
      expected.insert(expected.end(), second.begin(), second.end());
      const bool equal = copy.read() == expected;
      CHECK(equal);
    }
    // On the CPU, the copy is complete when the call returns.
    Order order = sum_of("cpu", 2);
    order.op = OpKind::kAllgather;
    const Bytes mine = floats(2, static_cast<float>(rank));
    order.input = mine.data();
    const hp_handle handle = submit(engine, order);
    await(engine, handle);
    float copied[4]{};
    RankGpu::copy_result(*engine.handles().done(handle), 0, copied, nullptr);
    engine.handles().release(handle);
    CHECK(copied[0] + copied[1] == 0);
    CHECK(copied[2] + copied[3] == 2);
  });
}

TEST_CASE("overlapping process sets give correct results on GPUs in any order of operations") {
  GpuJob job({.ranks = 4});
  job.run([&](int rank) {
    const auto set =
        static_cast<std::uint32_t>(await_value(job.engine(rank), job.engine(rank).add_set({0, 2})));
    const auto other = static_cast<std::uint32_t>(
        await_value(job.engine(rank), job.engine(rank).add_set({1, 2, 3})));
    for (int step = 0; step < 5; ++step) {
      // Rank 2 is in both sets and alternates their order.
      Order first = sum_of("t", 300), second = sum_of("u", 200);
      first.set = set;
      second.set = other;
      const bool swaps = step % 2 == 1;
      const auto run_first = [&] {
        if (rank != 0 && rank != 2) return;
        CHECK((job.perform(rank, first, floats(300, 1)) == floats(300, 2)));
      };
      if (!swaps) run_first();
      if (rank != 0) CHECK((job.perform(rank, second, floats(200, 1), true) == floats(200, 3)));
      if (swaps) run_first();
    }
    await(job.engine(rank), job.engine(rank).remove_set(set));
    CHECK((job.perform(rank, sum_of("all", 10), floats(10, 1)) == floats(10, 4)));
  });
}

TEST_CASE("a failed GPU fails the operations of all ranks") {
  GpuJob job({.ranks = 2});
  job.run([&](int rank) { job.perform(rank, sum_of("t", 10), floats(10, 1)); });
  job.gpu().lose_device();
  job.run([&](int rank) {
    const Status status = failure_of([&] { job.perform(rank, sum_of("u", 10), floats(10, 1)); });
    CHECK(!status.ok());
  });
}

TEST_CASE("a smaller buffer is used when GPU memory is short") {
  SimulatedOptions gpus;
  gpus.memory = 15 << 20;
  GpuJob job({.ranks = 2, .gpu = gpus});
  // The tensor is scaled and must be packed, usually into a buffer of 8 MiB besides its own 8 MiB.
  const std::size_t count = (4 << 20) / sizeof(float) + 1;
  job.run([&](int rank) {
    Order order = sum_of("t", count);
    order.prescale = 2;
    const Bytes result = job.perform(rank, order, floats(count, 1), true);
    CHECK((result == floats(count, 4)));
  });
}

TEST_CASE("NCCL runs every operation, also on process sets") {
  for (const Transport transport : {Transport::kThreads, Transport::kInprocHosts}) {
    for (const int ranks : {2, 3, 4}) {
      CAPTURE(ranks);
      GpuJob job({.transport = transport,
                  .ranks = ranks,
                  .engine = with_algorithm("nccl"),
                  .has_nccl = true});
      random_operations(job, kSlowedDown ? 8 : 25, true);
      CHECK(job.logged().find("not moved by NCCL") == std::string::npos);
      CHECK(job.nccl().alive() == static_cast<std::size_t>(ranks));
      job.run([&](int rank) {
        Engine& engine = job.engine(rank);
        const auto set = static_cast<std::uint32_t>(await_value(engine, engine.add_set({0, 1})));
        Order order = sum_of("t", 100);
        order.set = set;
        if (rank < 2) CHECK((job.perform(rank, order, floats(100, 1)) == floats(100, 2)));
        await(engine, engine.remove_set(set));
      });
      // The set's communicator is destroyed once the GPUs are idle.
      CHECK(comes_to([&] { return job.nccl().alive() == static_cast<std::size_t>(ranks); }));
      job.end();
      CHECK(job.nccl().alive() == 0);
    }
  }
}

TEST_CASE(
    "another algorithm is used if a rank lacks NCCL, versions differ, or two ranks share a GPU") {
  SimulatedOptions one_gpu;
  one_gpu.one_gpu = true;
  struct Case {
    GpuJobOptions options;
    std::vector<std::string> words;
  };
  std::vector<Case> cases(3);
  for (Case& one : cases) one.options.has_nccl = true;
  cases[0].options.nccl_versions = {23003, 22304};
  cases[0].words = {"2.23.4 on rank 1", "2.30.3 on rank 0"};
  cases[1].options.nccl_versions = {0, 23003};
  cases[1].words = {"none on rank 0", "2.30.3 on rank 1"};
  cases[2].options.gpu = one_gpu;
  cases[2].words = {"ranks 0, 1 share a GPU", "NCCL_MULTI_RANK_GPU_ENABLE"};
  for (const Case& one : cases) {
    GpuJob job(one.options);
    random_operations(job, 5, false);
    CHECK(mentions({HP_OK, job.logged()}, one.words));
    CHECK(job.nccl().alive() == 0);
  }
}

TEST_CASE("NCCL connects no ranks of different hosts in a job that encrypts") {
  EngineOptions engine = test_options();
  for (const bool encrypted : {true, false}) {
    engine.encrypted = encrypted;
    for (const int ranks : {2, 4}) {  // four: NCCL within each host
      GpuJob job({.transport = Transport::kInprocHosts,
                  .ranks = ranks,
                  .engine = engine,
                  .has_nccl = true});
      random_operations(job, 5, true);
      const bool refused = mentions({HP_OK, job.logged()}, {"does not encrypt"});
      CHECK(refused == encrypted);
      if (encrypted && ranks == 2) CHECK(job.nccl().alive() == 0);
    }
  }
}

TEST_CASE("no rank uses NCCL if one rank cannot create its communicator") {
  GpuJob job({.has_nccl = true});
  job.nccl().fail("ncclCommInitRankConfig", 2);
  random_operations(job, 5, false);
  CHECK(mentions({HP_OK, job.logged()}, {"not moved by NCCL", "ncclCommInitRank"}));
}

TEST_CASE("data_timeout does not include the wait for the framework's earlier work on the GPU") {
  EngineOptions engine = with_algorithm("ipc");
  engine.data_timeout = Seconds(kSlowedDown ? 1.5 : 0.4);
  GpuJob job({.engine = engine});
  job.run([&](int rank) { job.perform(rank, sum_of("first", 10), floats(10, 1)); });
  job.gpu().pause();
  std::barrier all_waited(2);
  job.run([&](int rank) {
    Framework& framework = job.framework(rank);
    // Each dtype needs another kernel, whose loading waits until the GPU is idle.
    std::vector<hp_handle> handles;
    for (const DType dtype : {DType::kFloat32, DType::kInt32}) {
      Order order = sum_of(dtype_name(dtype), 0);
      order.dtype = dtype;
      std::byte nothing{};
      order.input = order.output = &nothing;
      order.device = framework.device();
      order.stream = framework.stream();
      handles.push_back(submit(job.engine(rank), order));
    }
    CHECK(job.engine(rank).wait(handles.back(), 2.5 * engine.data_timeout.get()).code ==
          HP_IN_PROGRESS);
    all_waited.arrive_and_wait();
    if (rank == 0) job.gpu().resume();
    for (const hp_handle handle : handles) {
      await(job.engine(rank), handle);
      job.engine(rank).handles().release(handle);
    }
  });
}

TEST_CASE("an abort ends the waits of the other ranks' GPU streams") {
  GpuJob job({.ranks = 3, .engine = with_algorithm("nccl"), .has_nccl = true});
  job.run([&](int rank) { job.perform(rank, sum_of("first", 10), floats(10, 1)); });
  // The GPUs are busy, and rank 0 aborts when all ranks have enqueued their operation.
  job.gpu().pause();
  std::barrier all_submitted(3);
  job.run([&](int rank) {
    Framework& framework = job.framework(rank);
    Framework::Array array(framework, 40);
    array.write(floats(10, 1));
    Order order = sum_of("second", 10);
    order.input = order.output = array.address();
    order.device = framework.device();
    order.stream = framework.stream();
    const hp_handle handle = submit(job.engine(rank), order);
    await(job.engine(rank), handle);
    RankGpu::make_stream_wait(*job.engine(rank).handles().done(handle), framework.stream());
    all_submitted.arrive_and_wait();
    if (rank == 0) {
      job.engine(0).abort("the test wants it");
      job.gpu().resume();
    }
    const Status status =
        failure_of([&] { job.perform(rank, sum_of("third", 10), floats(10, 1)); });
    CHECK(mentions(status, {"third", "the test wants it"}));
    array.read();  // returns: the framework's stream is not blocked
  });
  CHECK(mentions({HP_OK, job.logged()}, {"second", "may be wrong"}));
}

TEST_CASE("an NCCL error ends the job and is reported") {
  GpuJob job({.engine = with_algorithm("nccl"), .has_nccl = true});
  job.run([&](int rank) { job.perform(rank, sum_of("first", 10), floats(10, 1)); });
  job.nccl().set_async_error();
  job.run([&](int rank) {
    const Status status = failure_of([&] {
      for (int i = 0; i < 1000; ++i) job.perform(rank, sum_of("more", 10), floats(10, 1));
    });
    CHECK(mentions(status, {"NCCL", "more"}));
  });
}
