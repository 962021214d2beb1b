// Collectives by CUDA IPC among the GPUs of one host, on simulated GPUs: the results equal the
// CPU's for every operation, size and number of rounds; all ranks use CUDA IPC or none; and ranks
// that wait for a missing rank are released.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <chrono>
#include <numeric>
#include <random>
#include <thread>

#include "tests/harness/gpu_operations.h"
#include "tests/harness/random_elements.h"

using namespace horoplug;
using namespace horoplug::testing;

namespace {

using Bytes = std::vector<std::byte>;

// Forces CUDA IPC, so that a failure of its setup is logged as a warning.
EngineOptions with_ipc() {
  EngineOptions options = test_options();
  options.algorithm = "ipc";
  return options;
}

// Without a latency cost, every allreduce uses the algorithm of two steps.
EngineOptions in_two_steps() {
  EngineOptions options = with_ipc();
  options.costs.ipc.latency = 0;
  return options;
}

// Driver functions with faults. The function pointers are global, because all tests have the same
// driver functions.
CUresult (*unlimited_allocate)(CUdeviceptr*, std::size_t) = nullptr;
CUresult allocate_little(CUdeviceptr* address, std::size_t bytes) {
  constexpr CUresult kOutOfMemory = 2;
  return bytes > 2 << 20 ? kOutOfMemory : unlimited_allocate(address, bytes);
}
CUresult set_nothing(CUdeviceptr, unsigned char, std::size_t, CUstream) { return 0; }
#if !defined(HOROPLUG_TSAN)
// While `blocked`, cuStreamWriteValue32 does not return: the rank is stopped just before its stream
// would signal the other ranks.
std::atomic<bool> blocked{false};
// Unblocks at the end of its scope if `enabled`.
struct Unblock {
  explicit Unblock(bool enabled) : enabled(enabled) {}
  ~Unblock() {
    if (!enabled) return;
    blocked = false;
    blocked.notify_all();
  }
  const bool enabled;
};
CUresult (*write_value)(CUstream, CUdeviceptr, std::uint32_t, unsigned) = nullptr;
CUresult write_later(CUstream stream, CUdeviceptr word, std::uint32_t value, unsigned flags) {
  blocked.wait(true);
  return write_value(stream, word, value, flags);
}
#endif

}  // namespace

TEST_CASE("concurrent random operations by CUDA IPC equal those of the CPU") {
  for (const int ranks : {2, 3, 4}) {
    for (const EngineOptions& options : {with_ipc(), in_two_steps()}) {
      CAPTURE(ranks);
      GpuJob job({.ranks = ranks, .engine = options});
      run_random(job, kSlowedDown ? 20 : 60, 10, {0, 6000});
      CHECK(count_peer_waits(job) > 0);
    }
  }
}

TEST_CASE("with little GPU memory on one rank, all ranks use smaller chunks in several rounds") {
  for (const EngineOptions& options : {in_two_steps(), with_ipc()}) {
    SimulatedOptions gpus;
    gpus.one_gpu = true;
    GpuJob job(
        {.ranks = 3, .engine = options, .gpu = gpus, .driver = [](int rank, cuda::DriverApi& api) {
           if (rank != 1) return;
           unlimited_allocate = api.MemAlloc;
           api.MemAlloc = allocate_little;
         }});
    run_random(job, 5, 1, {280'000, 300'000});
    CHECK(count_peer_waits(job) > 0);
    CHECK(count_of("in chunks of 1 MiB instead of 32", job.logged()) == 1);
    if (kSlowedDown) break;
  }
}

TEST_CASE("ranks stay synchronised after plans break") {
  GpuJob job({.ranks = 3, .engine = in_two_steps()});
  break_plans(job, 40);
}

TEST_CASE("if one rank cannot use CUDA IPC, no rank does, and one warning has the reason") {
  struct Failure {
    const char* reason;
    void (*driver)(int rank, cuda::DriverApi& api);
  };
  const Failure failures[] = {
      {"on rank 2: cuIpcOpenMemHandle of rank 0's memory",
       [](int rank, cuda::DriverApi& api) {
         if (rank == 2) api.IpcOpenMemHandle = refuse_to_open;
       }},
      {"on rank 1: cuMemAlloc of 2097152 bytes",
       [](int rank, cuda::DriverApi& api) {
         if (rank == 1) {
           api.MemAlloc = [](CUdeviceptr* address, std::size_t bytes) -> CUresult {
             return bytes == 2 << 20 ? 2 : allocate_little(address, bytes);
           };
         }
       }},
      {"reads other values from rank 1's memory",
       [](int rank, cuda::DriverApi& api) {
         if (rank == 1) api.MemsetD8Async = set_nothing;
       }},
  };
  for (const Failure& failure : failures) {
    CAPTURE(failure.reason);
    GpuJob job({.ranks = 3, .engine = with_ipc(), .driver = [&](int rank, cuda::DriverApi& api) {
                  unlimited_allocate =
                      api.MemAlloc == allocate_little ? unlimited_allocate : api.MemAlloc;
                  failure.driver(rank, api);
                }});
    job.run([&](int rank) { CHECK(sum_is_correct(job, rank, "first")); });
    const std::size_t before = count_peer_waits(job);
    job.run([&](int rank) { CHECK(sum_is_correct(job, rank, "second")); });
    CHECK(count_peer_waits(job) == before);
    CHECK(count_of(failure.reason, job.warnings()) == 1);
  }
}

TEST_CASE("removing a set frees its GPU memory after all ranks have finished reading it") {
  SimulatedOptions gpus;
  gpus.longest_delay = std::chrono::milliseconds(kSlowedDown ? 1 : 3);
  GpuJob job({.ranks = 3, .engine = in_two_steps(), .gpu = gpus});
  job.run([&](int rank) { CHECK(sum_is_correct(job, rank, "all")); });
  for (int i = 0; i < 6; ++i) {
    const std::size_t used = job.gpu().bytes_used(0);
    job.run([&](int rank) {
      Engine& engine = job.engine(rank);
      const auto set = static_cast<std::uint32_t>(await_value(engine, engine.add_set({0, 2})));
      if (rank != 1) {
        for (int step = 0; step < 3; ++step) {
          CHECK(sum_is_correct(job, rank, "t" + std::to_string(step), 500, set, 2));
        }
      }
      await(engine, engine.remove_set(set));
    });
    CHECK(job.gpu().bytes_used(0) == used);
  }
  job.run([&](int rank) { CHECK(sum_is_correct(job, rank, "all again")); });
}

// After the failure, memory is read without an order that ThreadSanitizer could see.
#if !defined(HOROPLUG_TSAN)
TEST_CASE("a stopped rank does not block its peer in the load of a kernel") {
  EngineOptions engine = with_ipc();
  engine.data_timeout = Seconds(1);
  GpuJob job({.ranks = 2, .engine = engine, .driver = [](int rank, auto& api) {
                if (rank == 0) return;
                write_value = api.StreamWriteValue32;
                api.StreamWriteValue32 = write_later;
              }});
  job.run([&](int rank) { CHECK(sum_is_correct(job, rank, "first")); });
  blocked = true;
  std::barrier submitted(2);
  job.run([&](int rank) {
    const Unblock unblock(rank == 0);
    Engine& engine = job.engine(rank);
    Framework& framework = job.framework(rank);
    // Allocated beforehand, because an allocation would wait for the blocked GPU as well.
    Framework::Array x(framework, 400), y(framework, 400);
    const auto begin = [&](Framework::Array& array, const char* name, DType dtype) {
      Order order;
      order.name = name;
      order.dtype = dtype;
      order.prescale = 3;
      order.shape = {100};
      order.input = order.output = array.address();
      order.device = framework.device();
      order.stream = framework.stream();
      return submit(engine, order);
    };
    // Rank 1 has announced both operations before it is stopped in the first one. The second one
    // needs kernels that are not loaded yet.
    if (rank == 0) submitted.arrive_and_wait();
    const hp_handle second = begin(x, "second", DType::kFloat32);
    const hp_handle third = begin(y, "third", DType::kInt32);
    if (rank == 1) submitted.arrive_and_wait();
    const Status status = failure_of([&] {
      await(engine, second);
      await(engine, third);
    });
    // Rank 1 goes on when rank 0 has ended. Whether it still enqueues both operations, which is
    // success on a GPU, depends on when it reads that rank 0 has failed.
    if (rank == 0) {
      CHECK(!status.ok());
      CHECK(mentions(status, {"allreduce 'third'", "for 1 s"}));
    }
  });
}

TEST_CASE("an abort releases streams that wait for a GPU that has stopped signalling") {
  drop_flag_writes = false;
  GpuJob job({.ranks = 2, .engine = with_ipc(), .driver = [](int rank, cuda::DriverApi& api) {
                if (rank != 1) return;
                intercept_flag_writes(api);
              }});
  job.run([&](int rank) { CHECK(sum_is_correct(job, rank, "first")); });
  drop_flag_writes = true;
  std::array<std::unique_ptr<InFlight>, 2> running;
  job.run([&](int rank) {
    auto& mine = running[static_cast<std::size_t>(rank)];
    mine = std::make_unique<InFlight>(job, rank, sum("second", 500, 1), false);
    mine->wait();
  });
  // The simulated GPU would report misuse if a stream waited forever.
  job.run([&](int rank) {
    if (rank == 1) job.engine(1).abort("it has had enough");
    const Status status = failure_of([&] { sum_is_correct(job, rank, "third"); });
    CHECK(!status.ok());
    job.framework(rank).read(0, 0);
  });
}
#endif
