// Tensors on the GPUs of one host by CUDA IPC, on simulated cards: the results are the CPU's in
// every operation, of every size and with every number of rounds; ranks use it together or not at
// all; and who waits for a rank that will not come is let go.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <numeric>
#include <random>
#include <thread>

#include "tests/gpu_job.h"
#include "tests/random_elements.h"

using namespace horoplug;
using namespace horoplug::testing;

namespace {

using Bytes = std::vector<std::byte>;
using Random = std::mt19937_64;

constexpr DType kDTypes[] = {DType::kBool,   DType::kUInt8,   DType::kInt8,    DType::kUInt16,
                             DType::kInt16,  DType::kUInt32,  DType::kInt32,   DType::kUInt64,
                             DType::kInt64,  DType::kFloat16, DType::kFloat32, DType::kBFloat16,
                             DType::kFloat64};
constexpr OpKind kOps[] = {OpKind::kAllreduce, OpKind::kBroadcast, OpKind::kAllgather,
                           OpKind::kAlltoall, OpKind::kReducescatter};
constexpr ReduceOp kReductions[] = {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin,
                                    ReduceOp::kMax, ReduceOp::kProduct};

template <typename T, std::size_t count>
T one_of(Random& random, const T (&choices)[count]) {
  return choices[random() % count];
}

// An operation as one rank submits it.
struct Part {
  Order order;
  Bytes input;
};

// Of tensors, on one rank.
struct Elements {
  std::size_t least, most;
};

// What all ranks submit, by rank.
std::vector<Part> random_operation(Random& random, int ranks, Elements elements, int number) {
  Order order;
  order.name = "t" + std::to_string(number);
  order.op = kOps[static_cast<std::size_t>(number) % std::size(kOps)];
  order.dtype = one_of(random, kDTypes);
  const bool reduces = order.op == OpKind::kAllreduce || order.op == OpKind::kReducescatter;
  if (reduces) order.reduce = one_of(random, kReductions);
  if (order.dtype == DType::kBool && order.reduce == ReduceOp::kAverage) {
    order.reduce = ReduceOp::kSum;
  }
  if (reduces && random() % 3 == 0) order.prescale = 0.5;
  if (reduces && random() % 3 == 0) order.postscale = 3;
  order.root = static_cast<int>(random() % static_cast<unsigned>(ranks));
  const std::size_t row = 1 + random() % 40;
  const auto rows = [&](std::size_t parts) {
    const std::size_t count = elements.least + random() % (elements.most - elements.least);
    return static_cast<std::int64_t>(count / row / parts);
  };
  const std::int64_t same = rows(1);
  std::vector<Part> parts;
  for (int rank = 0; rank < ranks; ++rank) {
    order.splits.clear();
    std::int64_t own = order.op == OpKind::kAllgather ? rows(1) : same;
    if (order.op == OpKind::kAlltoall) {
      for (int to = 0; to < ranks; ++to) {
        order.splits.push_back(rows(static_cast<std::size_t>(ranks)));
      }
      own = std::accumulate(order.splits.begin(), order.splits.end(), std::int64_t{0});
    }
    order.shape = {own, static_cast<std::int64_t>(row)};
    const auto count = static_cast<std::size_t>(own) * row;
    Bytes input(count * dtype_size(order.dtype));
    fill(order.dtype, input.data(), count, random);
    parts.push_back({order, std::move(input)});
  }
  return parts;
}

Bytes on_cpu(Engine& engine, const Part& part) {
  Order order = part.order;
  order.name += ".cpu";
  Bytes output(std::max<std::size_t>(part.input.size(), 1));
  const std::byte nothing{};
  order.input = part.input.empty() ? &nothing : part.input.data();
  if (order.op == OpKind::kAllreduce || order.op == OpKind::kBroadcast) {
    order.output = output.data();
  }
  return perform(engine, order);
}

// An operation on a rank's card that is under way.
class Running {
 public:
  Running(GpuJob& job, int rank, const Part& part, bool in_place)
      : framework_(job.framework(rank)),
        engine_(job.engine(rank)),
        from_(framework_, part.input.size()),
        to_(framework_, part.input.size()) {
    from_.write(part.input);
    Order order = part.order;
    order.input = from_.address();
    if (order.op == OpKind::kAllreduce || order.op == OpKind::kBroadcast) {
      order.output = in_place ? from_.address() : to_.address();
    }
    order.device = framework_.device();
    order.stream = framework_.stream();
    handle_ = submit(engine_, order);
  }
  ~Running() {
    if (!failed_) engine_.handles().release(handle_);
  }

  // Until all of it is in streams.
  void wait() {
    failed_ = true;  // await() gives back what fails
    await(engine_, handle_);
    failed_ = false;
    engine_.make_stream_wait(handle_, framework_.stream());
  }
  Bytes result() {
    wait();
    const auto& outcome = engine_.handles().done(handle_)->outcomes.front();
    return framework_.read(std::bit_cast<CUdeviceptr>(outcome.data),
                           static_cast<std::size_t>(outcome.bytes));
  }

 private:
  Framework& framework_;
  Engine& engine_;
  Framework::Array from_, to_;
  hp_handle handle_;
  bool failed_ = false;
};

// Random operations, `at_once` of which are under way at a time.
void run_random(GpuJob& job, int count, int at_once, Elements elements) {
  const int ranks = job.size();
  Random random(seed());
  std::vector<std::vector<Part>> all;
  for (int i = 0; i < count; ++i) {
    all.push_back(random_operation(random, ranks, elements, i));
  }
  job.run([&](int rank) {
    const auto part = [&](int i) -> const Part& {
      return all[static_cast<std::size_t>(i)][static_cast<std::size_t>(rank)];
    };
    for (int first = 0; first < count; first += at_once) {
      const int end = std::min(first + at_once, count);
      std::vector<Bytes> expected;
      for (int i = first; i < end; ++i) expected.push_back(on_cpu(job.engine(rank), part(i)));
      std::vector<std::unique_ptr<Running>> running;
      for (int i = first; i < end; ++i) {
        running.push_back(std::make_unique<Running>(job, rank, part(i), i % 2 == 0));
      }
      for (int i = first; i < end; ++i) {
        const auto at = static_cast<std::size_t>(i - first);
        const Order& order = part(i).order;
        INFO("seed " << seed() << ": rank " << rank << ", " << op_kind_name(order.op) << " "
                     << dtype_name(order.dtype) << " " << reduce_op_name(order.reduce) << " "
                     << order.name);
        const bool equal = running[at]->result() == expected[at];
        CHECK(equal);
      }
    }
  });
}

// How often streams have waited for other ranks.
std::size_t waits(GpuJob& job) { return job.card().count("wait for a word"); }

std::size_t count_of(const std::string& part, const std::string& text) {
  std::size_t count = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) {
    ++count;
  }
  return count;
}

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

Part sum(const std::string& name, std::size_t count, float value) {
  Order order;
  order.name = name;
  order.shape = {static_cast<std::int64_t>(count)};
  Bytes input(count * sizeof value);
  for (std::size_t i = 0; i < count; ++i) {
    std::memcpy(input.data() + i * sizeof value, &value, sizeof value);
  }
  return {order, std::move(input)};
}

// Whether all ranks of a set, who call this, get the right sum.
bool sums_up(GpuJob& job, int rank, const std::string& name, std::uint32_t set = 0, int ranks = 0) {
  const auto size = static_cast<float>(ranks == 0 ? job.size() : ranks);
  Part part = sum(name, 500, 1);
  part.order.set = set;
  return Running(job, rank, part, false).result() == sum(name, 500, size).input;
}

// Functions of a driver that does less than it should. The table is the same in all tests.
CUresult (*allocate)(CUdeviceptr*, std::size_t) = nullptr;
CUresult allocate_little(CUdeviceptr* address, std::size_t bytes) {
  constexpr CUresult kOutOfMemory = 2;
  return bytes > 2 << 20 ? kOutOfMemory : allocate(address, bytes);
}
CUresult set_nothing(CUdeviceptr, unsigned char, std::size_t, CUstream) { return 0; }
CUresult refuse_to_open(CUdeviceptr*, CUipcMemHandle, unsigned) { return 201; }

// As if a stream never came to where it should say so.
CUresult (*write_word)(CUstream, CUdeviceptr, std::uint32_t, unsigned) = nullptr;
std::atomic<bool> stuck{false};
[[maybe_unused]] CUresult write_unless_stuck(CUstream stream, CUdeviceptr word, std::uint32_t value,
                                             unsigned flags) {
  return stuck.load() ? 0 : write_word(stream, word, value, flags);
}

}  // namespace

TEST_CASE("operations by CUDA IPC, many of them in flight") {
  for (const int ranks : {2, 3, 4}) {
    for (const EngineOptions& options : {with_ipc(), in_two_steps()}) {
      CAPTURE(ranks);
      GpuJob job({.ranks = ranks, .engine = options});
      run_random(job, kSanitized ? 20 : 60, 10, {0, 6000});
      CHECK(waits(job) > 0);
    }
  }
}

TEST_CASE("ranks that share a card, and have little memory there, go in several rounds") {
  for (const EngineOptions& options : {in_two_steps(), with_ipc()}) {
    SimulatedOptions cards;
    cards.one_card = true;
    GpuJob job({.ranks = 3,
                .engine = options,
                .card = cards,
                .driver = [](int rank, cuda::DriverApi& api) {
                  if (rank != 1) return;
                  allocate = api.MemAlloc;
                  api.MemAlloc = allocate_little;
                }});
    run_random(job, 5, 1, {280'000, 300'000});
    CHECK(waits(job) > 0);
    CHECK(count_of("in pieces of 1 MiB instead of 32", job.logged()) == 1);
    if (kSanitized) break;
  }
}

TEST_CASE("plans that break leave the rounds in step") {
  GpuJob job({.ranks = 3, .engine = in_two_steps()});
  constexpr int kSteps = 40, kTensors = 4;
  job.run([&](int rank) {
    Random random(seed() + static_cast<unsigned>(rank));
    for (int step = 0; step < kSteps; ++step) {
      // Every few steps ranks submit in different orders, which no plan allows for.
      std::vector<int> order(kTensors);
      std::iota(order.begin(), order.end(), 0);
      if (step % 8 == 7) std::shuffle(order.begin(), order.end(), random);
      std::vector<std::unique_ptr<Running>> running;
      for (const int i : order) {
        running.push_back(std::make_unique<Running>(
            job, rank, sum("t" + std::to_string(i), 300, static_cast<float>(step + i)), true));
        if (random() % 4 == 0) std::this_thread::yield();
      }
      for (std::size_t i = 0; i < running.size(); ++i) {
        const auto value = 3 * static_cast<float>(step + order[i]);
        const bool equal = running[i]->result() == sum("", 300, value).input;
        CHECK(equal);
      }
    }
    CHECK(job.engine(rank).stats().planned_batches > 0);
  });
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
    job.run([&](int rank) { CHECK(sums_up(job, rank, "first")); });
    const std::size_t before = waits(job);
    job.run([&](int rank) { CHECK(sums_up(job, rank, "second")); });
    CHECK(waits(job) == before);
    CHECK(count_of(failure.reason, job.warnings()) == 1);
  }
}

TEST_CASE("a set is gone when no rank reads its memory any more") {
  SimulatedOptions cards;
  cards.longest_delay = std::chrono::milliseconds(kSanitized ? 1 : 3);
  GpuJob job({.ranks = 3, .engine = in_two_steps(), .card = cards});
  job.run([&](int rank) { CHECK(sums_up(job, rank, "all")); });
  for (int i = 0; i < 6; ++i) {
    const std::size_t used = job.card().bytes_used(0);
    job.run([&](int rank) {
      Engine& engine = job.engine(rank);
      const auto set = static_cast<std::uint32_t>(await_value(engine, engine.add_set({0, 2})));
      if (rank != 1) {
        for (int step = 0; step < 3; ++step) {
          CHECK(sums_up(job, rank, "t" + std::to_string(step), set, 2));
        }
      }
      await(engine, engine.remove_set(set));
    });
    CHECK(job.card().bytes_used(0) == used);
  }
  job.run([&](int rank) { CHECK(sums_up(job, rank, "all again")); });
}

// What is read then has no order that ThreadSanitizer could see.
#if !defined(__SANITIZE_THREAD__)
TEST_CASE("who waits for a rank whose card does nothing any more goes on when the job fails") {
  stuck = false;
  GpuJob job({.ranks = 2, .engine = with_ipc(), .driver = [](int rank, cuda::DriverApi& api) {
                if (rank != 1) return;
                write_word = api.StreamWriteValue32;
                api.StreamWriteValue32 = write_unless_stuck;
              }});
  job.run([&](int rank) { CHECK(sums_up(job, rank, "first")); });
  stuck = true;
  std::array<std::unique_ptr<Running>, 2> running;
  job.run([&](int rank) {
    auto& mine = running[static_cast<std::size_t>(rank)];
    mine = std::make_unique<Running>(job, rank, sum("second", 500, 1), false);
    mine->wait();
  });
  // Nobody has to wait for ever, as the simulated card would say after half a minute.
  job.run([&](int rank) {
    if (rank == 1) job.engine(1).abort("it has had enough");
    const Status status = failure_of([&] { sums_up(job, rank, "third"); });
    CHECK(!status.ok());
    job.framework(rank).read(0, 0);
  });
}
#endif
