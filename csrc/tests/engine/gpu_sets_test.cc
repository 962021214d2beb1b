// Operations of several process sets on simulated GPUs, whose driver blocks the host until the GPU
// is idle in every call in which CUDA's driver may do so: no rank waits forever.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
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

// While `held` is true, rank 1 sees its first communicator as in progress.
std::atomic<bool> held{false};
std::atomic<ncclComm_t> first{nullptr};
ncclResult_t (*get_state)(ncclComm_t, ncclResult_t*) = nullptr;
ncclResult_t state_of_rank_1(ncclComm_t communicator, ncclResult_t* state) {
  ncclComm_t none = nullptr;
  first.compare_exchange_strong(none, communicator);
  const ncclResult_t result = get_state(communicator, state);
  if (held && communicator == first && *state == cuda::kNcclSuccess) *state = cuda::kNcclInProgress;
  return result;
}

constexpr std::size_t kCount = 300;

// An allreduce of ones. It is scaled, so that it needs the kernels of its dtype.
RankOperation ones(const std::string& name, DType dtype, std::uint32_t set) {
  RankOperation part = sum(name, kCount, 1);
  part.order.dtype = dtype;
  part.order.set = set;
  part.order.prescale = 2;
  part.input = make_array(dtype, kCount, [](std::size_t) { return 1; });
  return part;
}

Bytes result_of(DType dtype, int ranks) {
  return make_array(dtype, kCount, [&](std::size_t) { return 2 * ranks; });
}

// While `lost` is true, rank 2 does not enqueue its NCCL reductions, so the other ranks' GPUs wait.
std::atomic<bool> lost{false};
decltype(cuda::NcclApi::AllReduce) nccl_allreduce = nullptr;
ncclResult_t lossy_allreduce(const void* send, void* receive, std::size_t count,
                             ncclDataType_t dtype, ncclRedOp_t op, ncclComm_t communicator,
                             CUstream stream) {
  if (lost) return cuda::kNcclSuccess;
  return nccl_allreduce(send, receive, count, dtype, op, communicator, stream);
}

// A job whose rank 2 can lose reductions. misuse() has the misuse that the simulated GPU reported,
// such as a host that was blocked for longer than the wait timeout.
class LossyJob {
 public:
  LossyJob() : job_(options()) {
    lost = false;
    job_.gpu().on_misuse([this](const std::string& what) {
      const std::lock_guard lock(mutex_);
      misuse_ += what + "\n";
    });
    for (int rank = 0; rank < job_.size(); ++rank) {
      for (std::uint32_t set = 0; set < kSets; ++set) {
        arrays_.push_back(std::make_unique<Framework::Array>(job_.framework(rank), kCount * 4));
      }
    }
  }
  GpuJob& job() { return job_; }
  std::string misuse() {
    const std::lock_guard lock(mutex_);
    return misuse_;
  }
  // Runs an allreduce until it is enqueued. All operations of a set use the same array, because an
  // allocation could block as well.
  void enqueue(int rank, const std::string& name, std::uint32_t set) {
    Engine& engine = job_.engine(rank);
    Order order = ones(name, DType::kFloat32, set).order;
    order.input = order.output = arrays_[static_cast<std::size_t>(rank) * kSets + set]->address();
    order.device = job_.framework(rank).device();
    order.stream = job_.framework(rank).stream();
    const hp_handle handle = submit(engine, order);
    await(engine, handle);
    engine.handles().release(handle);
  }
  // Submits an operation that no other rank submits, and returns the status with which the job
  // ends.
  Status end(int rank) {
    return failure_of([&] { enqueue(rank, "of rank " + std::to_string(rank), 0); });
  }

 private:
  static GpuJobOptions options() {
    GpuJobOptions options;
    options.ranks = 3;
    options.gpu.wait_timeout = std::chrono::seconds(kSlowedDown ? 15 : 5);
    options.engine.algorithm = "nccl";
    options.engine.data_timeout = Seconds(kSlowedDown ? 2 : 0.5);
    options.has_nccl = true;
    options.nccl.late = 0;
    options.nccl_functions = [](int rank, cuda::NcclApi& api) {
      if (rank == 2) nccl_allreduce = std::exchange(api.AllReduce, lossy_allreduce);
    };
    return options;
  }
  std::mutex mutex_;
  std::string misuse_;
  GpuJob job_;
  static constexpr std::uint32_t kSets = 3;
  std::vector<std::unique_ptr<Framework::Array>> arrays_;  // by rank and set
};

std::uint32_t add_gpu_set(Engine& engine, const std::vector<int>& ranks) {
  return static_cast<std::uint32_t>(await_value(engine, engine.add_set(ranks)));
}

}  // namespace

TEST_CASE("two sets whose operations are ordered differently load kernels without a deadlock") {
  held = false;
  first = nullptr;
  GpuJobOptions options;
  options.gpu.wait_timeout = std::chrono::seconds(kSlowedDown ? 10 : 3);
  options.has_nccl = true;
  options.nccl.late = 0;
  options.nccl_functions = [](int rank, cuda::NcclApi& api) {
    if (rank != 1) return;
    get_state = api.CommGetAsyncError;
    api.CommGetAsyncError = state_of_rank_1;
  };
  GpuJob job(options);
  std::mutex mutex;
  std::string misuse;
  job.gpu().on_misuse([&](const std::string& what) {
    const std::lock_guard lock(mutex);
    misuse += what + "\n";
  });
  job.run([&](int rank) {
    Engine& engine = job.engine(rank);
    const std::uint32_t own[] = {add_gpu_set(engine, {0}), add_gpu_set(engine, {1})};
    const std::uint32_t pair = add_gpu_set(engine, {0, 1});
    Framework& framework = job.framework(rank);
    const auto submit_in_place = [&](Framework::Array& array, const std::string& name, DType dtype,
                                     std::uint32_t set) {
      RankOperation part = ones(name, dtype, set);
      array.write(part.input);
      part.order.input = part.order.output = array.address();
      part.order.device = framework.device();
      part.order.stream = framework.stream();
      return submit(engine, part.order);
    };
    const auto finish = [&](hp_handle handle) {
      const Status status = failure_of([&] { await(engine, handle); });
      REQUIRE_MESSAGE(status.ok(), status.message);
      RankGpu::make_stream_wait(*engine.handles().done(handle), framework.stream());
      engine.handles().release(handle);
    };
    // Memory and tables are allocated before anything can block. Rank 0 loads the kernel for the
    // pair's second operation, rank 1 the kernel for the operation of all ranks.
    Framework::Array x(framework, kCount * 4), y(framework, kCount * 4), z(framework, kCount * 8);
    finish(submit_in_place(x, "a", DType::kFloat32, pair));
    finish(submit_in_place(y, "b", DType::kFloat32, pair));
    finish(submit_in_place(z, "c", DType::kInt64, 0));
    Framework::Array& own_array = rank == 0 ? y : z;
    finish(submit_in_place(own_array, "d", rank == 0 ? DType::kInt32 : DType::kFloat64, own[rank]));
    own_array.read();

    // Rank 1 is held after the pair's first operation. Without an order of the sets, rank 0 would
    // now enqueue the pair's second operation, and rank 1 the one of all ranks. kLong suffices for
    // that.
    constexpr Seconds kLong{0.5};
    if (rank == 1) held = true;
    const hp_handle one = submit_in_place(x, "e", DType::kFloat32, pair);
    const hp_handle two = submit_in_place(y, "f", DType::kInt32, pair);
    if (rank == 0) {
      engine.wait(one, kLong);
      engine.wait(two, kLong);
    }
    const hp_handle three = submit_in_place(z, "g", DType::kFloat64, 0);
    if (rank == 1) {
      engine.wait(three, 3 * kLong);
      held = false;
    }
    for (const hp_handle handle : {one, two, three}) finish(handle);
    CHECK((x.read() == result_of(DType::kFloat32, 2)));
    CHECK((y.read() == result_of(DType::kInt32, 2)));
    CHECK((z.read() == result_of(DType::kFloat64, 2)));
  });
  CHECK(misuse == "");
}

TEST_CASE("overlapping sets run operations in any order with every algorithm") {
  const std::vector<std::vector<int>> groups = {{0, 1, 2}, {0, 1}, {1, 2}, {0, 2}, {0, 1, 2}, {1}};
  struct Way {
    const char* name;
    bool nccl;
  };
  for (const Way& way : {Way{"nccl", true}, Way{"ipc", false}, Way{"staged", false}}) {
    CAPTURE(way.name);
    GpuJobOptions options;
    options.ranks = 3;
    options.engine.algorithm = way.name;
    options.has_nccl = way.nccl;
    GpuJob job(options);
    constexpr int kRounds = kSlowedDown ? 3 : 8, kAtOnce = 3;
    job.run([&](int rank) {
      Engine& engine = job.engine(rank);
      std::vector<std::uint32_t> sets = {0};
      for (std::size_t i = 1; i < groups.size(); ++i)
        sets.push_back(add_gpu_set(engine, groups[i]));
      Random random(seed() + static_cast<unsigned>(rank));
      for (int round = 0; round < kRounds; ++round) {
        struct Part {
          std::string name;
          DType dtype;
          std::size_t set;
          std::unique_ptr<InFlight> running = nullptr;
        };
        std::vector<Part> parts;
        for (std::size_t i = 0; i < sets.size(); ++i) {
          if (std::ranges::count(groups[i], rank) == 0) continue;
          for (int k = 0; k < kAtOnce; ++k) {
            const std::size_t dtype = (static_cast<std::size_t>(round) + 5 * i + k) % 12 + 1;
            parts.push_back(
                {"t" + std::to_string(round) + "." + std::to_string(k), kAllDTypes[dtype], i});
          }
        }
        std::shuffle(parts.begin(), parts.end(), random);
        for (Part& part : parts) {
          part.running = std::make_unique<InFlight>(
              job, rank, ones(part.name, part.dtype, sets[part.set]), random() % 2 == 0);
          if (random() % 4 == 0) std::this_thread::yield();
        }
        std::shuffle(parts.begin(), parts.end(), random);
        for (const Part& part : parts) {
          const int ranks = static_cast<int>(groups[part.set].size());
          INFO("seed " << seed() << ": rank " << rank << ", " << part.name << " of set "
                       << part.set);
          const bool equal = part.running->result() == result_of(part.dtype, ranks);
          CHECK(equal);
        }
      }
      // Each set is removed while the operation of another set is running.
      for (std::size_t i = 1; i < sets.size(); ++i) {
        const auto running = std::make_unique<InFlight>(
            job, rank, ones("last" + std::to_string(i), DType::kFloat32, 0), false);
        await(engine, engine.remove_set(sets[i]));
        CHECK((running->result() == result_of(DType::kFloat32, 3)));
      }
    });
  }
}

TEST_CASE("GPU streams that wait for a missing rank are released in all sets") {
  LossyJob lossy;
  lossy.job().run([&](int rank) {
    const std::uint32_t pair = add_gpu_set(lossy.job().engine(rank), {0, 2});
    if (rank != 1) lossy.enqueue(rank, "a", pair);
    lossy.enqueue(rank, "b", 0);
    CHECK(sum_is_correct(lossy.job(), rank, "until all are here"));
    lost = true;
    if (rank != 1) lossy.enqueue(rank, "c", pair);
    lossy.enqueue(rank, "d", 0);
    CHECK(mentions(lossy.end(rank), {"has not ended on the GPU", "all ranks answer"}));
  });
  CHECK(lossy.misuse() == "");
}

TEST_CASE("removing a set does not wait for other sets' work on the GPU") {
  LossyJob lossy;
  lossy.job().run([&](int rank) {
    Engine& engine = lossy.job().engine(rank);
    const std::uint32_t removed = add_gpu_set(engine, {0, 1});
    const std::uint32_t other = add_gpu_set(engine, {0, 2});
    if (rank != 2) lossy.enqueue(rank, "a", removed);
    if (rank != 1) lossy.enqueue(rank, "b", other);
    CHECK(sum_is_correct(lossy.job(), rank, "until all are here"));
    lost = true;
    if (rank != 1) lossy.enqueue(rank, "c", other);
    await(engine, engine.remove_set(removed));
    CHECK(mentions(lossy.end(rank), {"allreduce 'c'", "has not ended on the GPU"}));
  });
  CHECK(lossy.misuse() == "");
}
