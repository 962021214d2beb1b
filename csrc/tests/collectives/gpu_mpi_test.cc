// MPI's own collectives on GPU memory, with simulated GPUs and an MPI within this process: the
// results equal the CPU's; MPI is called only after the GPU has written the data; memory that MPI
// may still use is never used again; and all ranks use MPI or none.
#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <bit>
#include <cstring>
#include <mutex>
#include <thread>
#include <type_traits>

#include "base/status.h"
#include "collectives/collective.h"
#include "collectives/gpu/gpu_group.h"
#include "tests/harness/fake_mpi.h"
#include "tests/harness/gpu_operations.h"
#include "tests/harness/random_elements.h"

using namespace horoplug;
using namespace horoplug::testing;

namespace {

using Bytes = std::vector<std::byte>;
using OnGpu = Mpi::OnGpu;

bool is_on_device(const cuda::DriverApi& api, const void* memory) {
  unsigned type = 0;
  return api.PointerGetAttribute(&type, cuda::kMemoryType, std::bit_cast<CUdeviceptr>(memory)) ==
             cuda::kSuccess &&
         type == cuda::kDeviceMemory;
}

// The MPI of a job whose ranks are threads.
class Shared {
 public:
  Shared(int ranks, std::vector<OnGpu> on_gpu) : job_(ranks), on_gpu_(std::move(on_gpu)) {}

  std::shared_ptr<Mpi> of(int rank) { return std::make_shared<Locked>(*this, rank); }

  // The driver functions of the job's GPUs.
  const cuda::DriverApi* api = nullptr;
  std::array<std::atomic<int>, kOpKindCount> on_device{};  // collectives begun on GPU memory
  std::atomic<bool> failing{false};

 private:
  class Locked final : public NoMpi {
   public:
    Locked(Shared& shared, int rank) : shared_(shared), rank_(rank), mpi_(shared.job_, rank) {}

    bool has(OpKind kind) const override { return mpi_.has(kind); }
    // As with all MPIs: reductions of float16 are not offered, because MPI would round more often.
    bool can_reduce(DType dtype, ReduceOp op) const override {
      return dtype != DType::kFloat16 && mpi_.can_reduce(dtype, op);
    }
    OnGpu on_gpu() const override { return shared_.on_gpu_[static_cast<std::size_t>(rank_)]; }
    void set(std::shared_ptr<Setting> setting) override { setting_ = std::move(setting); }

    bool test(Request& request) override {
      mpi_.fails = shared_.failing;
      return call([&] { return mpi_.test(request); });
    }
    Request allreduce(void* data, std::size_t elements, DType dtype, ReduceOp op) override {
      return begin(OpKind::kAllreduce, data,
                   [&] { return mpi_.allreduce(data, elements, dtype, op); });
    }
    Request broadcast(void* data, std::size_t bytes, int root) override {
      return begin(OpKind::kBroadcast, data, [&] { return mpi_.broadcast(data, bytes, root); });
    }
    Request allgather(void* data, const Parts& parts) override {
      return begin(OpKind::kAllgather, data, [&] { return mpi_.allgather(data, parts); });
    }
    Request alltoall(const void* input, const Parts& sent, void* output,
                     const Parts& received) override {
      return begin(OpKind::kAlltoall, output,
                   [&] { return mpi_.alltoall(input, sent, output, received); });
    }
    Request reducescatter(const void* input, void* output, const int* elements, DType dtype,
                          ReduceOp op) override {
      return begin(OpKind::kReducescatter, output,
                   [&] { return mpi_.reducescatter(input, output, elements, dtype, op); });
    }
    Request barrier() override {
      return call([&] { return mpi_.barrier(); });
    }

   private:
    template <typename Function>
    std::invoke_result_t<Function> call(const Function& function) {
      struct Within {
        explicit Within(Setting* of) : setting(of) { entered = of != nullptr && of->enter(); }
        ~Within() {
          if (entered) setting->leave();
        }
        Setting* const setting;
        bool entered;
      };
      const Within within(setting_.get());
      if (began_on_device_) {
        // The simulated GPU ends the process if no context is current.
        CUdevice device = -1;
        const bool right = shared_.api->CtxGetDevice(&device) == 0 && device == rank_;
        CHECK(right);
      }
      std::lock_guard lock(shared_.mutex_);
      return function();
    }
    template <typename Function>
    Request begin(OpKind kind, const void* memory, const Function& function) {
      if (is_on_device(*shared_.api, memory)) {
        ++shared_.on_device[static_cast<std::size_t>(kind)];
        began_on_device_ = true;
      }
      return call(function);
    }

    Shared& shared_;
    const int rank_;
    FakeMpi mpi_;
    std::shared_ptr<Setting> setting_;
    bool began_on_device_ = false;
  };

  std::mutex mutex_;
  FakeJob job_;
  const std::vector<OnGpu> on_gpu_;
};

// A job whose ranks have MPIs with these capabilities.
struct GpuMpiJob {
  explicit GpuMpiJob(std::vector<OnGpu> on_gpu, std::chrono::microseconds delay = {})
      : ranks(static_cast<int>(on_gpu.size())), mpi(ranks, std::move(on_gpu)) {
    GpuJobOptions options;
    options.ranks = ranks;
    options.engine.algorithm = "mpi";
    options.mpi = [this](int rank) { return mpi.of(rank); };
    if (delay.count() > 0) options.gpu.longest_delay = delay;
    job = std::make_unique<GpuJob>(std::move(options));
    mpi.api = &job->gpu().api();
  }
  int begun_on_device(OpKind kind) const { return mpi.on_device[static_cast<std::size_t>(kind)]; }

  const int ranks;
  Shared mpi;
  std::unique_ptr<GpuJob> job;
};

constexpr OpKind kMoves[] = {OpKind::kBroadcast, OpKind::kAllgather, OpKind::kAlltoall};
constexpr OpKind kReduces[] = {OpKind::kAllreduce, OpKind::kReducescatter};

}  // namespace

TEST_CASE("concurrent random operations by MPI on GPU memory equal those of the CPU") {
  for (const int ranks : {2, 3, 4}) {
    for (const int delay : {50, 2000}) {
      CAPTURE(ranks);
      GpuMpiJob job(std::vector<OnGpu>(static_cast<std::size_t>(ranks), OnGpu::kAll),
                    std::chrono::microseconds(delay));
      const int count = kSlowedDown || delay > 50 ? 15 : 60;
      run_random(*job.job, count, 10, {0, 6000});
      for (const OpKind kind : kMoves) CHECK(job.begun_on_device(kind) > 0);
      // MPI has only some of the reductions, so few operations may contain none of them.
      if (count > 15) {
        for (const OpKind kind : kReduces) CHECK(job.begun_on_device(kind) > 0);
      }
    }
  }
}

TEST_CASE("ranks call MPI's collectives in the same order after plans break") {
  GpuMpiJob job({OnGpu::kAll, OnGpu::kAll, OnGpu::kAll});
  constexpr int kSteps = 24, kTensors = 4;
  job.job->run([&](int rank) {
    for (int step = 0; step < kSteps; ++step) {
      std::vector<std::unique_ptr<InFlight>> running;
      for (int i = 0; i < kTensors; ++i) {
        // In every eighth step, ranks submit in different orders.
        const int tensor = (i + (step % 8 == 7 ? rank : 0)) % kTensors;
        running.push_back(std::make_unique<InFlight>(
            *job.job, rank, sum("t" + std::to_string(tensor), 300, 1), step % 2 == 0));
      }
      for (auto& each : running) {
        const bool equal = each->result() == sum("", 300, 3).input;
        CHECK(equal);
      }
    }
    CHECK(job.job->engine(rank).stats().planned_batches > 0);
  });
  CHECK(job.begun_on_device(OpKind::kAllreduce) > 0);
}

TEST_CASE("ranks use only the MPI capabilities that all of them have, and log what is missing") {
  struct Case {
    std::vector<OnGpu> on_gpu;
    OnGpu together;
    const char* line;
  };
  const Case cases[] = {
      {{OnGpu::kNothing, OnGpu::kNothing},
       OnGpu::kNothing,
       "are not moved by MPI: it does not say that it takes GPUs' memory"},
      {{OnGpu::kAll, OnGpu::kNothing, OnGpu::kMoves},
       OnGpu::kNothing,
       "are not moved by MPI: on rank 1, it does not say"},
      {{OnGpu::kAll, OnGpu::kMoves},
       OnGpu::kMoves,
       "are moved by MPI, but not reduced by it: on rank 1, its nonblocking reductions"},
      {{OnGpu::kMoves, OnGpu::kMoves}, OnGpu::kMoves, "not reduced by it: its nonblocking"},
  };
  for (const Case& each : cases) {
    CAPTURE(each.line);
    GpuMpiJob job(each.on_gpu);
    run_random(*job.job, 15, 5, {100, 3000});
    for (const OpKind kind : kMoves) {
      CHECK((job.begun_on_device(kind) > 0) == (each.together >= OnGpu::kMoves));
    }
    for (const OpKind kind : kReduces) CHECK(job.begun_on_device(kind) == 0);
    CHECK(count_of(each.line, job.job->warnings()) == 1);  // a warning, because MPI is forced
    CHECK(count_of(each.line, job.job->logged()) == each.on_gpu.size());
  }
}

// LeakSanitizer would report the memory that is abandoned to MPI.
#if !defined(HOROPLUG_ASAN)
TEST_CASE("an MPI error fails the job with a message that names MPI") {
  GpuMpiJob job({OnGpu::kAll, OnGpu::kAll});
  job.job->run([&](int rank) {
    InFlight first(*job.job, rank, sum("first", 500, 1), false);
    CHECK(first.result() == sum("", 500, 2).input);
  });
  job.mpi.failing = true;
  job.job->run([&](int rank) {
    const Status status =
        failure_of([&] { InFlight(*job.job, rank, sum("second", 500, 1), false).result(); });
    CHECK(mentions(status, {"second", "MPI has failed"}));
  });
  job.job->end();
}
#endif

namespace {

// One rank of an alltoall, without an engine.
struct AlltoallRank {
  AlltoallRank(SimulatedGpu& gpu, FakeJob& job, int number)
      : framework(gpu, number), mpi(job, number) {
    cuda::Toolkit toolkit;
    toolkit.driver = gpu.api();
    toolkit.images = SimulatedGpu::code;
    auto opened = cuda::Device::open(std::make_shared<const cuda::Toolkit>(toolkit), number,
                                     Log(LogLevel::kFatal, [](LogLevel, const std::string&) {}));
    comm.set_mpi(&mpi);
    comm.set_gpu(std::make_shared<GpuGroup>(std::move(opened)));
    call.kind = OpKind::kAlltoall;
    call.on_gpu = true;
    call.input = input.address();
    call.output = output.address();
    call.send_bytes = call.receive_bytes = sizes;
  }
  void start() {
    mpi.last = {};
    fiber = std::make_unique<Fiber>(gpu_mpi(comm, call));
  }
  bool has_begun() const { return mpi.last.input != nullptr; }
  template <typename Condition>
  void poll_until(const Condition& condition) {
    while (!condition()) {
      if (fiber->poll()) break;
      std::this_thread::yield();
    }
  }

  static constexpr std::size_t kBytes = 200;
  const std::vector<std::size_t> sizes{kBytes / 2, kBytes / 2};
  Framework framework;
  Framework::Array input{framework, kBytes}, output{framework, kBytes};
  FakeMpi mpi;
  Comm comm{framework.device(), std::vector<std::vector<Link*>>(2), nullptr};
  Call call;
  std::unique_ptr<Fiber> fiber;
};

struct Pair {
  Pair() : gpu({.devices = 2}) {
    REQUIRE(gpu.api().Init(0) == cuda::kSuccess);
    for (int i = 0; i < 2; ++i) ranks.push_back(std::make_unique<AlltoallRank>(gpu, job, i));
    for (auto& rank : ranks) {
      rank->input.write(Bytes(AlltoallRank::kBytes, std::byte{7}));
      rank->output.write(Bytes(AlltoallRank::kBytes, std::byte{2}));
      static_cast<void>(rank->output.read());  // waits until both writes are done
    }
  }
  AlltoallRank& operator[](std::size_t i) { return *ranks[i]; }

  SimulatedGpu gpu;
  FakeJob job{2};
  std::vector<std::unique_ptr<AlltoallRank>> ranks;
};

}  // namespace

TEST_CASE("MPI is not called before the GPU has written its input") {
  Pair pair;
  pair.gpu.pause();
  for (std::size_t i = 0; i < 2; ++i) {
    pair[i].start();
    for (int turn = 0; turn < 100; ++turn) CHECK_FALSE(pair[i].fiber->poll());
    CHECK(pair[i].fiber->polled());
    CHECK_FALSE(pair[i].has_begun());
  }
  pair.gpu.resume();
  for (std::size_t i = 0; i < 2; ++i) {
    pair[i].poll_until([&] { return pair[i].has_begun(); });
    CHECK(is_on_device(pair.gpu.api(), pair[i].mpi.last.input));
    CHECK(is_on_device(pair.gpu.api(), pair[i].mpi.last.output));
    // MPI never gets the user's memory.
    CHECK(pair[i].mpi.last.input != pair[i].input.address());
    CHECK(pair[i].mpi.last.output != pair[i].output.address());
  }
  for (std::size_t i = 0; i < 2; ++i) CHECK(pair[i].fiber->poll());
}

TEST_CASE("GPU memory that MPI may still use is neither reused nor freed") {
#if defined(HOROPLUG_ASAN)
  const __lsan::ScopedDisabler abandoned_to_mpi;
#endif
  Pair pair;
  pair[0].start();
  pair[0].poll_until([&] { return pair[0].has_begun(); });
  CHECK_FALSE(pair[0].fiber->poll());
  const FakeJob::Arguments had = pair[0].mpi.last;
  pair[0].fiber.reset();  // another rank has died
  pair[1].start();
  pair[1].poll_until([&] { return pair[1].has_begun(); });  // MPI writes to it
  CHECK(static_cast<const std::byte*>(had.output)[0] == std::byte{7});
  CHECK(pair[0].output.read() == Bytes(AlltoallRank::kBytes, std::byte{2}));

  pair[0].start();
  pair[0].poll_until([&] { return pair[0].has_begun(); });
  CHECK(pair[0].mpi.last.output != had.output);
  CHECK(pair[0].mpi.last.input != had.input);
  pair[0].fiber.reset();
  pair.ranks.clear();
  CHECK(is_on_device(pair.gpu.api(), had.output));
}
