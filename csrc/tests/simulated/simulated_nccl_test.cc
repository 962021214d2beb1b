// Tests of the simulated NCCL itself. Ranks are threads, which have a simulated GPU each or share
// one.
#include "tests/simulated/simulated_nccl.h"

#include <doctest/doctest.h>

#include <atomic>
#include <bit>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "device/cuda/runtime/context.h"
#include "tests/simulated/simulated_gpu.h"

namespace {

using namespace horoplug;
using namespace horoplug::cuda;
using horoplug::testing::SimulatedGpu;
using horoplug::testing::SimulatedNccl;
using horoplug::testing::SimulatedNcclOptions;

constexpr ncclDataType_t kInt32 = 2, kFloat16 = 6, kFloat32 = 7;
constexpr ncclRedOp_t kSum = 0, kAverage = 4;

// One rank: its context, stream and communicator.
struct Rank {
  Rank(const SimulatedGpu& gpu, const SimulatedNccl& of_nccl, int number, int of)
      : nccl(of_nccl.api()),
        rank(number),
        ranks(of),
        context(gpu.api(), number),
        current(context),
        stream(context) {}

  // Waits until the communicator is no longer in progress.
  ncclResult_t settle(ncclComm_t of) const {
    ncclResult_t state = kNcclInProgress;
    while (state == kNcclInProgress) {
      CHECK(nccl.CommGetAsyncError(of, &state) == kNcclSuccess);
      std::this_thread::yield();
    }
    return state;
  }
  ncclResult_t init(const ncclUniqueId& id) {
    NcclConfig config;
    config.blocking = 0;
    const ncclResult_t begun = nccl.CommInitRankConfig(&comm, ranks, id, rank, &config);
    return begun == kNcclInProgress ? settle(comm) : begun;
  }
  void finish(ncclResult_t result) const {
    const bool ok = result == kNcclSuccess || (result == kNcclInProgress && settle(comm) == 0);
    CHECK(ok);
  }
  template <typename T>
  void write(const DeviceMemory& to, const std::vector<T>& values) const {
    CHECK(context.api().MemcpyHtoDAsync(to.address(), values.data(), values.size() * sizeof(T),
                                        stream.handle()) == 0);
  }
  template <typename T>
  std::vector<T> read(const DeviceMemory& from, std::size_t count) const {
    std::vector<T> values(count);
    CHECK(context.api().MemcpyDtoHAsync(values.data(), from.address(), count * sizeof(T),
                                        stream.handle()) == 0);
    return values;
  }

  const NcclApi& nccl;
  const int rank, ranks;
  const Context context;
  const Current current;
  const cuda::Stream stream;
  ncclComm_t comm = nullptr;
};

void* at(const DeviceMemory& memory, std::size_t offset = 0) {
  return std::bit_cast<void*>(static_cast<std::uintptr_t>(memory.address() + offset));
}

// Runs ranks as threads. Rank r uses device r.
struct Job {
  explicit Job(int count, SimulatedNcclOptions options = {}, bool one_gpu = false)
      : ranks(count), gpu({.devices = count, .one_gpu = one_gpu}), nccl(gpu, std::move(options)) {
    gpu.on_misuse([this](const std::string&) { ++misuses; });
    REQUIRE(start_driver(gpu.api()) == "");
    REQUIRE(nccl.api().GetUniqueId(&id) == 0);
  }
  void run(const std::function<void(Rank&)>& program) {
    std::vector<std::thread> threads;
    for (int i = 0; i < ranks; ++i) {
      threads.emplace_back([this, &program, i] {
        Rank rank(gpu, nccl, i, ranks);
        program(rank);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  int ranks;
  std::atomic<int> misuses{0};
  SimulatedGpu gpu;
  SimulatedNccl nccl;
  ncclUniqueId id{};
};

TEST_CASE("collective operations of four ranks give correct results, also when repeated") {
  Job job(4);
  job.run([&](Rank& r) {
    REQUIRE(r.init(job.id) == kNcclSuccess);
    constexpr std::size_t kCount = 1000;
    const DeviceMemory small(r.context, 4 * kCount), large(r.context, 16 * kCount);
    for (int round = 0; round < 10; ++round) {
      r.write(small, std::vector<std::int32_t>(kCount, r.rank + round));
      r.finish(
          r.nccl.AllReduce(at(small), at(small), kCount, kInt32, kSum, r.comm, r.stream.handle()));
      CHECK(r.read<std::int32_t>(small, kCount) ==
            std::vector<std::int32_t>(kCount, 6 + 4 * round));
    }
    r.write(small, std::vector<float>(kCount, static_cast<float>(r.rank)));
    r.finish(r.nccl.AllGather(at(small), at(large), kCount, kFloat32, r.comm, r.stream.handle()));
    CHECK(r.read<float>(large, 4 * kCount)[2 * kCount] == 2);
    r.finish(
        r.nccl.Broadcast(at(small), at(small), kCount, kFloat32, 3, r.comm, r.stream.handle()));
    CHECK(r.read<float>(small, kCount) == std::vector<float>(kCount, 3));
    r.finish(r.nccl.ReduceScatter(at(large), at(small), kCount, kFloat32, kAverage, r.comm,
                                  r.stream.handle()));
    CHECK(r.read<float>(small, kCount)[1] == static_cast<float>(r.rank));
    r.write(small, std::vector<std::uint16_t>(kCount, 0x3C00));  // 1 in float16
    r.finish(
        r.nccl.AllReduce(at(small), at(small), kCount, kFloat16, kSum, r.comm, r.stream.handle()));
    CHECK(r.read<std::uint16_t>(small, 1)[0] == 0x4400);  // 4
    CHECK(r.nccl.CommDestroy(r.comm) == kNcclSuccess);
  });
  CHECK(job.misuses == 0);
  CHECK(job.nccl.alive() == 0);
}

TEST_CASE("a group with two sends and two recvs per peer matches them in order") {
  Job job(3);
  job.run([&](Rank& r) {
    REQUIRE(r.init(job.id) == kNcclSuccess);
    const DeviceMemory out(r.context, 24), in(r.context, 24);
    std::vector<std::int32_t> values;
    for (int i = 0; i < 6; ++i) values.push_back(10 * r.rank + i);
    r.write(out, values);
    CHECK(r.nccl.GroupStart() == 0);
    for (std::size_t peer = 0; peer < 3; ++peer) {
      for (std::size_t part = 0; part < 2; ++part) {
        const std::size_t offset = 8 * peer + 4 * part;
        const int number = static_cast<int>(peer);
        CHECK(r.nccl.Send(at(out, offset), 1, kInt32, number, r.comm, r.stream.handle()) == 0);
        CHECK(r.nccl.Recv(at(in, offset), 1, kInt32, number, r.comm, r.stream.handle()) == 0);
      }
    }
    r.finish(r.nccl.GroupEnd());
    const int mine = 2 * r.rank;
    CHECK(r.read<std::int32_t>(in, 6) ==
          std::vector<std::int32_t>{mine, mine + 1, mine + 10, mine + 11, mine + 20, mine + 21});
    CHECK(r.nccl.CommFinalize(r.comm) == kNcclInProgress);
    CHECK(r.settle(r.comm) == kNcclSuccess);
    CHECK(r.nccl.CommDestroy(r.comm) == kNcclSuccess);
  });
}

TEST_CASE("ncclCommSplit groups ranks by color and orders them by key") {
  Job job(4);
  job.run([&](Rank& r) {
    REQUIRE(r.init(job.id) == kNcclSuccess);
    ncclComm_t part = nullptr;
    // Colors are odd and even ranks, the highest rank first; rank 0 has no color.
    const int color = r.rank == 0 ? -1 : r.rank % 2;
    const ncclResult_t begun = r.nccl.CommSplit(r.comm, color, -r.rank, &part, nullptr);
    CHECK((part == nullptr) == (r.rank == 0));
    if (part != nullptr) {
      CHECK((begun == kNcclInProgress && r.settle(part) == kNcclSuccess));
      const DeviceMemory memory(r.context, 4);
      r.write(memory, std::vector<std::int32_t>{r.rank});
      const ncclResult_t result =
          r.nccl.Broadcast(at(memory), at(memory), 1, kInt32, 0, part, r.stream.handle());
      if (result == kNcclInProgress) r.settle(part);
      CHECK(r.read<std::int32_t>(memory, 1)[0] == (r.rank == 2 ? 2 : 3));
      CHECK(r.nccl.CommDestroy(part) == kNcclSuccess);
    }
    CHECK(r.nccl.CommDestroy(r.comm) == kNcclSuccess);
  });
}

TEST_CASE("ncclCommAbort ends an operation that waits for a missing rank") {
  Job job(2, {.late = 0});
  job.run([&](Rank& r) {
    REQUIRE(r.init(job.id) == kNcclSuccess);
    const DeviceMemory memory(r.context, 4);
    if (r.rank == 0) {
      const Event event(r.context);
      CHECK(r.nccl.AllReduce(at(memory), at(memory), 1, kInt32, kSum, r.comm, r.stream.handle()) ==
            0);
      event.record(r.stream.handle());
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      CHECK_FALSE(event.done());
      CHECK(r.nccl.CommAbort(r.comm) == kNcclSuccess);
      r.stream.synchronize();
      CHECK(event.done());
      CHECK(job.misuses == 0);
      ncclResult_t state = 0;
      CHECK(r.nccl.CommGetAsyncError(r.comm, &state) != kNcclSuccess);
      CHECK(job.misuses == 1);
    } else {
      CHECK(r.nccl.CommAbort(r.comm) == kNcclSuccess);
    }
  });
  // ncclCommAbort also ends an initialisation that waits for a missing rank.
  SimulatedNccl* const nccl = &job.nccl;
  Rank alone(job.gpu, *nccl, 0, 2);
  ncclUniqueId other{};
  CHECK(nccl->api().GetUniqueId(&other) == 0);
  NcclConfig config;
  config.blocking = 0;
  CHECK(nccl->api().CommInitRankConfig(&alone.comm, 2, other, 0, &config) == kNcclInProgress);
  CHECK(nccl->api().AllReduce(nullptr, nullptr, 0, kInt32, kSum, alone.comm, nullptr) != 0);
  CHECK(std::string(nccl->api().GetLastError(alone.comm)).starts_with("Attempt to use"));
  CHECK(nccl->api().CommAbort(alone.comm) == kNcclSuccess);
}

TEST_CASE("two ranks can share a GPU only with NCCL_MULTI_RANK_GPU_ENABLE") {
  for (const bool wanted : {false, true}) {
    Job job(2, {.multi_rank_gpu = wanted}, /*one_gpu=*/true);
    job.run([&](Rank& r) {
      CHECK(r.init(job.id) == (wanted ? kNcclSuccess : 5));
      const std::string text = r.nccl.GetLastError(r.comm);
      CHECK((text.find("NCCL_MULTI_RANK_GPU_ENABLE=1") == std::string::npos) == wanted);
      CHECK(r.nccl.CommAbort(r.comm) == kNcclSuccess);
    });
  }
}

TEST_CASE("different operations on the ranks are reported as misuse, and errors can be injected") {
  Job job(2, {.late = 0});
  job.run([&](Rank& r) {
    REQUIRE(r.init(job.id) == kNcclSuccess);
    const DeviceMemory memory(r.context, 8);
    const auto count = static_cast<std::size_t>(r.rank) + 1;
    CHECK(r.nccl.AllReduce(at(memory), at(memory), count, kInt32, kSum, r.comm,
                           r.stream.handle()) == 0);
    r.stream.synchronize();
  });
  CHECK(job.misuses > 0);
  job.nccl.set_async_error(6);
  job.nccl.fail("ncclGetUniqueId", 2);
  CHECK(job.nccl.api().GetUniqueId(&job.id) == 2);
}

}  // namespace
