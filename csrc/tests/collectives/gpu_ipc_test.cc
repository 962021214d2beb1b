// Tensors on the GPUs of one host by CUDA IPC, on simulated GPUs: the results are the CPU's in
// every operation, of every size and with every number of rounds; ranks use it together or not at
// all; and a rank that waits for one that will not come is released.
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

// Forced, so that a failure is said aloud.
EngineOptions with_ipc() {
  EngineOptions options = test_options();
  options.algorithm = "ipc";
  return options;
}

// Every allreduce is one of two steps.
EngineOptions in_two_steps() {
  EngineOptions options = with_ipc();
  options.costs.ipc.latency = 0;
  return options;
}

// Functions of a driver that does less than it should. The table is the same in all tests.
CUresult (*allocate)(CUdeviceptr*, std::size_t) = nullptr;
CUresult allocate_little(CUdeviceptr* address, std::size_t bytes) {
  constexpr CUresult kOutOfMemory = 2;
  return bytes > 2 << 20 ? kOutOfMemory : allocate(address, bytes);
}
CUresult set_nothing(CUdeviceptr, unsigned char, std::size_t, CUstream) { return 0; }
#if !defined(__SANITIZE_THREAD__)
// While `stopped`, a rank does not come back from where its stream would tell the others' that it
// has come.
std::atomic<bool> stopped{false};
struct LetGo {
  explicit LetGo(bool it_does) : does(it_does) {}
  ~LetGo() {
    if (!does) return;
    stopped = false;
    stopped.notify_all();
  }
  const bool does;
};
CUresult (*write_value)(CUstream, CUdeviceptr, std::uint32_t, unsigned) = nullptr;
CUresult write_later(CUstream stream, CUdeviceptr word, std::uint32_t value, unsigned flags) {
  stopped.wait(true);
  return write_value(stream, word, value, flags);
}
#endif

}  // namespace

TEST_CASE("many operations by CUDA IPC in flight") {
  for (const int ranks : {2, 3, 4}) {
    for (const EngineOptions& options : {with_ipc(), in_two_steps()}) {
      CAPTURE(ranks);
      GpuJob job({.ranks = ranks, .engine = options});
      run_random(job, kSanitized ? 20 : 60, 10, {0, 6000});
      CHECK(count_peer_waits(job) > 0);
    }
  }
}

TEST_CASE("ranks that share a GPU, and have little memory there, go in several rounds") {
  for (const EngineOptions& options : {in_two_steps(), with_ipc()}) {
    SimulatedOptions gpus;
    gpus.one_gpu = true;
    GpuJob job(
        {.ranks = 3, .engine = options, .gpu = gpus, .driver = [](int rank, cuda::DriverApi& api) {
           if (rank != 1) return;
           allocate = api.MemAlloc;
           api.MemAlloc = allocate_little;
         }});
    run_random(job, 5, 1, {280'000, 300'000});
    CHECK(count_peer_waits(job) > 0);
    CHECK(count_of("in chunks of 1 MiB instead of 32", job.logged()) == 1);
    if (kSanitized) break;
  }
}

TEST_CASE("plans that break leave the rounds in step") {
  GpuJob job({.ranks = 3, .engine = in_two_steps()});
  break_plans(job, 40);
}

TEST_CASE("either all ranks use CUDA IPC, or none does and one line says why") {
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
                  allocate = api.MemAlloc == allocate_little ? allocate : api.MemAlloc;
                  failure.driver(rank, api);
                }});
    job.run([&](int rank) { CHECK(sum_is_correct(job, rank, "first")); });
    const std::size_t before = count_peer_waits(job);
    job.run([&](int rank) { CHECK(sum_is_correct(job, rank, "second")); });
    CHECK(count_peer_waits(job) == before);
    CHECK(count_of(failure.reason, job.warnings()) == 1);
  }
}

TEST_CASE("a set is gone when no rank reads its memory any more") {
  SimulatedOptions gpus;
  gpus.longest_delay = std::chrono::milliseconds(kSanitized ? 1 : 3);
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

// What is read then has no order that ThreadSanitizer could see.
#if !defined(__SANITIZE_THREAD__)
TEST_CASE("a stopped rank keeps nobody where a kernel is loaded") {
  EngineOptions engine = with_ipc();
  engine.data_timeout = 1;
  GpuJob job({.ranks = 2, .engine = engine, .driver = [](int rank, auto& api) {
                if (rank == 0) return;
                write_value = api.StreamWriteValue32;
                api.StreamWriteValue32 = write_later;
              }});
  job.run([&](int rank) { CHECK(sum_is_correct(job, rank, "first")); });
  stopped = true;
  std::barrier submitted(2);
  job.run([&](int rank) {
    const LetGo let_go(rank == 0);
    Engine& engine = job.engine(rank);
    Framework& framework = job.framework(rank);
    // There beforehand, as the framework is kept, too, where it allocates memory.
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
    // Rank 1 has said that it comes to both before it is stopped in the first one. The second one
    // takes kernels that are not there yet.
    if (rank == 0) submitted.arrive_and_wait();
    const hp_handle second = begin(x, "second", DType::kFloat32);
    const hp_handle third = begin(y, "third", DType::kInt32);
    if (rank == 1) submitted.arrive_and_wait();
    const Status status = failure_of([&] {
      await(engine, second);
      await(engine, third);
    });
    CHECK(!status.ok());
    if (rank == 0) CHECK(mentions(status, {"allreduce 'third'", "for 1 s"}));
  });
}

TEST_CASE("a failing job releases ranks that wait for a GPU that has stopped") {
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
  // Nobody has to wait for ever, as the simulated GPU would say after half a minute.
  job.run([&](int rank) {
    if (rank == 1) job.engine(1).abort("it has had enough");
    const Status status = failure_of([&] { sum_is_correct(job, rank, "third"); });
    CHECK(!status.ok());
    job.framework(rank).read(0, 0);
  });
}
#endif
