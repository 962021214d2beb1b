// The hierarchical allreduce of GPU tensors, which reduces within each host first, on two hosts
// with simulated GPUs: the results equal those of the CPU's hierarchical allreduce for every dtype
// and size; all ranks use it or none; and ranks that wait for a missing rank are released.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <chrono>
#include <numeric>
#include <random>
#include <thread>

#include "tests/harness/elements.h"
#include "tests/harness/gpu_operations.h"
#include "tests/harness/random_elements.h"

using namespace horoplug;
using namespace horoplug::testing;

namespace {

using Bytes = std::vector<std::byte>;
using Random = std::mt19937_64;

EngineOptions forced(const char* name = "hierarchical") {
  EngineOptions options = test_options();
  options.algorithm = name;
  return options;
}

// Even ranks are on one host, odd ranks on the other.
GpuJobOptions on_two_hosts(int ranks, EngineOptions engine = forced()) {
  return {.transport = Transport::kInprocHosts, .ranks = ranks, .engine = std::move(engine)};
}

// The same with NCCL and without CUDA IPC.
GpuJobOptions on_two_hosts_with_nccl_alone() {
  GpuJobOptions options = on_two_hosts(4);
  options.has_nccl = true;
  options.driver = [](int, cuda::DriverApi& api) { api.IpcOpenMemHandle = refuse_to_open; };
  return options;
}

// An allreduce of random elements, or, if `exact`, of numbers whose sums and products are exact in
// any order.
std::vector<RankOperation> allreduce_of(Random& random, int ranks, Order order, std::size_t count,
                                        bool exact) {
  order.shape = {static_cast<std::int64_t>(count)};
  if (!has_reduction(order.reduce, order.dtype)) order.reduce = ReduceOp::kSum;
  if (random() % 3 == 0) order.prescale = 0.5;
  if (random() % 3 == 0) order.postscale = 3;
  std::vector<RankOperation> parts;
  for (int rank = 0; rank < ranks; ++rank) {
    Bytes input(count * dtype_size(order.dtype));
    fill(order.dtype, input.data(), count, random);
    if (exact) {
      input = make_array(order.dtype, count, [&](std::size_t) { return 1 + random() % 2; });
    }
    parts.push_back({order, std::move(input)});
  }
  return parts;
}

// Runs allreduces of every dtype with every reduction, in random sizes. Those of one dtype run
// concurrently.
void run_all(GpuJob& job, bool exact) {
  constexpr std::size_t kCounts[] = {0, 1, 7, 64, 1000, 4001};
  Random random(seed());
  std::vector<std::vector<std::vector<RankOperation>>> all;
  std::vector<Order> kinds;
  for (const DType dtype : kAllDTypes) {
    kinds.emplace_back().name = dtype_name(dtype);
    kinds.back().dtype = dtype;
  }
  for (const DType wire : {DType::kFloat16, DType::kBFloat16}) {
    kinds.emplace_back().name = std::string("as ") + dtype_name(wire);
    kinds.back().compressed = wire;
  }
  for (const Order& kind : kinds) {
    all.emplace_back();
    for (const ReduceOp reduce : kReductions) {
      Order order = kind;
      order.name += std::string(" ") + reduce_op_name(reduce);
      order.reduce = reduce;
      const std::size_t count = kCounts[random() % std::size(kCounts)];
      all.back().push_back(allreduce_of(random, job.size(), order, count, exact));
    }
  }
  job.run([&](int rank) {
    const auto me = static_cast<std::size_t>(rank);
    for (const auto& together : all) {
      std::vector<std::unique_ptr<InFlight>> running;
      for (const auto& parts : together) {
        running.push_back(
            std::make_unique<InFlight>(job, rank, parts[me], running.size() % 2 == 0));
      }
      for (std::size_t i = 0; i < running.size(); ++i) {
        const RankOperation& part = together[i][me];
        INFO("seed " << seed() << ": rank " << rank << ", " << part.order.name << ", "
                     << part.input.size() << " bytes");
        const bool equal = running[i]->result() == on_cpu(job.engine(rank), part);
        CHECK(equal);
      }
    }
  });
}

}  // namespace

TEST_CASE("with CUDA IPC within each host, allreduces of every dtype equal those of the CPU") {
  for (const int ranks : {4, 6}) {
    CAPTURE(ranks);
    GpuJob job(on_two_hosts(ranks));
    run_all(job, false);
    CHECK(count_peer_waits(job) > 0);
    CHECK(job.warnings().empty());
  }
}

TEST_CASE("with NCCL within each host, allreduces of every dtype equal those of the CPU") {
  for (const int ranks : {4, 6}) {
    CAPTURE(ranks);
    GpuJobOptions options = on_two_hosts(ranks);
    options.has_nccl = true;
    GpuJob job(options);
    run_all(job, true);
    // Each rank has one communicator, that of its host; none spans hosts.
    CHECK(job.nccl().alive() == static_cast<std::size_t>(ranks));
    CHECK(job.warnings().empty());
    job.end();
    CHECK(job.nccl().alive() == 0);
  }
}

TEST_CASE("operations other than allreduce fall back to host memory") {
  GpuJobOptions options = on_two_hosts(4);
  options.has_nccl = true;
  GpuJob job(options);
  run_random(job, kSlowedDown ? 10 : 30, 5, {0, 3000});
}

TEST_CASE("CUDA IPC is not used while another algorithm is forced") {
  GpuJob job(on_two_hosts(4, forced("staged")));
  job.run([&](int rank) { CHECK(sum_is_correct(job, rank, "t")); });
  CHECK(count_peer_waits(job) == 0);
}

TEST_CASE("buffers of several windows are reduced, also if the last window is padded") {
  GpuJob job(on_two_hosts(4));
  const std::size_t window = (16 << 20) / sizeof(float);  // elements; a window has 16 MiB
  // Sanitizers run fewer sizes, because they are slow with so much memory.
  for (const std::size_t count : {(kSlowedDown ? 1 : 2) * window + 3, window - 1}) {
    if (kSlowedDown && count < window) continue;
    const std::string name = std::to_string(count);
    job.run([&](int rank) { CHECK(sum_is_correct(job, rank, name, count)); });
  }
}

TEST_CASE("sums are correct in installed plans and after plans break") {
  GpuJob job(on_two_hosts(4));
  break_plans(job, kSlowedDown ? 12 : 30);
}

TEST_CASE("a joined rank takes part without changing the result") {
  GpuJob job(on_two_hosts(4));
  job.run([&](int rank) {
    if (rank != 1) {
      const Bytes result = InFlight(job, rank, sum("t", 1001, 2), rank == 0).result();
      CHECK((result == sum("t", 1001, 6).input));
    }
    await(job.engine(rank), job.engine(rank).join(0));
  });
}

TEST_CASE("hierarchical is chosen by default on GPUs without NCCL") {
  GpuJob job(on_two_hosts(4, test_options()));
  job.run([&](int rank) { CHECK(sum_is_correct(job, rank, "t")); });
  CHECK(count_peer_waits(job) > 0);
}

TEST_CASE("with NCCL, hierarchical is chosen only for dtypes that NCCL cannot reduce") {
  GpuJobOptions options = on_two_hosts(4, test_options());
  options.has_nccl = true;
  GpuJob job(options);
  job.run([&](int rank) { CHECK(sum_is_correct(job, rank, "t")); });
  CHECK(job.nccl().alive() == 4);  // the four ranks of one communicator
  CHECK(count_peer_waits(job) == 0);
  // NCCL has no 16-bit integers.
  job.run([&](int rank) {
    RankOperation part = sum("u", 100, 0);
    part.order.dtype = DType::kInt16;
    part.order.shape = {200};
    CHECK((InFlight(job, rank, part, true).result() == part.input));
  });
  CHECK(count_peer_waits(job) > 0);
  CHECK(job.nccl().alive() == 4);
  CHECK(job.warnings().empty());
}

TEST_CASE("hierarchical can be forced for GPU tensors only") {
  EngineOptions engine = test_options();
  engine.gpu_algorithm = "hierarchical";
  GpuJobOptions options = on_two_hosts(4, engine);
  options.has_nccl = true;
  GpuJob job(options);
  job.run([&](int rank) {
    CHECK(sum_is_correct(job, rank, "t"));
    CHECK(sum_is_correct(job, rank, "u"));
  });
  // There are two communicators of two ranks each; none of four ranks was set up.
  CHECK(job.nccl().alive() == 4);
  CHECK(count_of("of 4 ranks", job.logged()) == 0);
}

TEST_CASE("if one rank cannot use the algorithm, no rank does, and one warning has the reason") {
  struct Case {
    const char* reason;
    int ranks;
    int refuses;  // the rank that cannot open IPC memory; -1: none
  };
  const Case cases[] = {
      {"each host needs the same number of ranks, at least two", 5, -1},
      {"each host needs the same number of ranks, at least two", 2, -1},
      {"ranks 1, 3 have neither NCCL nor CUDA IPC there", 4, 3},
  };
  for (const Case& one : cases) {
    CAPTURE(one.ranks);
    GpuJobOptions options = on_two_hosts(one.ranks);
    options.driver = [&](int rank, cuda::DriverApi& api) {
      if (rank == one.refuses) api.IpcOpenMemHandle = refuse_to_open;
    };
    GpuJob job(options);
    job.run([&](int rank) { CHECK(sum_is_correct(job, rank, "first")); });
    const std::size_t before = count_peer_waits(job);
    job.run([&](int rank) { CHECK(sum_is_correct(job, rank, "second")); });
    CHECK(count_peer_waits(job) == before);
    CHECK(count_of(one.reason, job.warnings()) == 1);
  }
}

TEST_CASE("one host can use NCCL while the other one uses CUDA IPC") {
  GpuJobOptions options = on_two_hosts(4);
  options.has_nccl = true;
  options.nccl_versions = {23003, 0, 23003, 22304};
  GpuJob job(options);
  job.run([&](int rank) { CHECK(sum_is_correct(job, rank, "t", 10'001)); });
  CHECK(job.nccl().alive() == 2);
  CHECK(count_peer_waits(job) > 0);
}

// Transport::kMixed maps memory twice in one process, which ThreadSanitizer does not know.
#if !defined(HOROPLUG_TSAN)
TEST_CASE("process sets run independently and release their GPU memory when they are removed") {
  GpuJobOptions options = on_two_hosts(6);
  options.transport = Transport::kMixed;
  for (const bool has_nccl : {false, true}) {
    options.has_nccl = has_nccl;
    GpuJob job(options);
    job.run([&](int rank) { CHECK(sum_is_correct(job, rank, "all")); });
    const std::size_t used = job.gpu().bytes_used(0);
    for (int i = 0; i < 3; ++i) {
      job.run([&](int rank) {
        Engine& engine = job.engine(rank);
        // One set has two ranks on each host, the other has two on one host and one on the other.
        const auto even =
            static_cast<std::uint32_t>(await_value(engine, engine.add_set({0, 1, 4, 5})));
        const auto uneven =
            static_cast<std::uint32_t>(await_value(engine, engine.add_set({0, 2, 3})));
        for (int step = 0; step < 3; ++step) {
          const std::string name = "t" + std::to_string(step);
          if (rank < 2 || rank > 3) CHECK(sum_is_correct(job, rank, name, 900, even, 4));
          if (rank == 0 || rank == 2 || rank == 3) {
            CHECK(sum_is_correct(job, rank, name, 900, uneven, 3));
          }
        }
        await(engine, engine.remove_set(even));
        await(engine, engine.remove_set(uneven));
      });
      CHECK(comes_to([&] { return job.gpu().bytes_used(0) == used; }));
    }
    job.run([&](int rank) { CHECK(sum_is_correct(job, rank, "all again")); });
    job.end();
    for (int device = 0; device < 6; ++device) {
      CHECK(comes_to([&] { return job.gpu().bytes_used(device) == 0; }));
    }
  }
}
#endif

TEST_CASE("an abort while operations are under way fails them on all ranks") {
  GpuJob job(on_two_hosts_with_nccl_alone());
  job.run([&](int rank) { CHECK(sum_is_correct(job, rank, "first")); });
  // The GPUs are busy, so that all ranks wait for them.
  job.gpu().pause();
  std::barrier all_submitted(4);
  job.run([&](int rank) {
    InFlight running(job, rank, sum("second", 500, 1), true);
    all_submitted.arrive_and_wait();
    if (rank == 3) job.engine(3).abort("the test wants it");
    const Status status = failure_of([&] { running.wait(); });
    CHECK(mentions(status, {"second", "the test wants it"}));
    all_submitted.arrive_and_wait();
    if (rank == 3) job.gpu().resume();
    job.framework(rank).read(0, 0);  // returns: the framework's stream is not blocked
  });
}

TEST_CASE("an NCCL error while operations are under way fails them on all ranks with that error") {
  GpuJob job(on_two_hosts_with_nccl_alone());
  job.run([&](int rank) { CHECK(sum_is_correct(job, rank, "first")); });
  job.gpu().pause();
  std::array<std::unique_ptr<InFlight>, 4> running;
  job.run([&](int rank) {
    running[static_cast<std::size_t>(rank)] =
        std::make_unique<InFlight>(job, rank, sum("second", 500, 1), true);
  });
  job.nccl().set_async_error();
  job.run([&](int rank) {
    const Status status = failure_of([&] { running[static_cast<std::size_t>(rank)]->wait(); });
    CHECK(mentions(status, {"second", "NCCL"}));
  });
  job.gpu().resume();
}

// After the failure, memory is read without an order that ThreadSanitizer could see.
#if !defined(HOROPLUG_TSAN)
TEST_CASE("a rank whose GPU stops signalling fails the job after the data timeout") {
  drop_flag_writes = false;
  EngineOptions engine = forced();
  engine.data_timeout = Seconds(0.5);
  GpuJobOptions options = on_two_hosts(4, engine);
  options.driver = [](int rank, cuda::DriverApi& api) {
    if (rank != 2) return;
    intercept_flag_writes(api);
  };
  GpuJob job(options);
  job.run([&](int rank) { CHECK(sum_is_correct(job, rank, "first")); });
  drop_flag_writes = true;
  job.run([&](int rank) {
    InFlight running(job, rank, sum("second", 500, 1), false);
    const Status status = failure_of([&] {
      running.wait();
      // On the ranks where "second" was done, the next operation fails.
      sum_is_correct(job, rank, "third");
    });
    // The failure is first reported by a rank that waits for the GPU, or by one that is done and
    // still watches "second".
    CHECK(mentions(status, {"second", "0.5 s"}));
    job.framework(rank).read(0, 0);
  });
}
#endif
