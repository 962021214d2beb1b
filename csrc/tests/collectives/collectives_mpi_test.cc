// Collectives by MPI's own algorithms, with an MPI within this process: the arguments of its calls,
// when it is chosen, and what happens to memory that it may still use.
#include <doctest/doctest.h>

#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <system_error>
#include <vector>

#include "base/status.h"
#include "collectives/collective.h"
#include "tests/harness/cluster.h"
#include "tests/harness/fake_mpi.h"

using namespace horoplug;
using namespace horoplug::testing;

namespace {

using Sizes = std::vector<std::size_t>;
using Data = std::vector<std::byte>;

const Algorithm& by_mpi(OpKind kind) {
  for (const Algorithm& algorithm : algorithms()) {
    if (algorithm.kind == kind && std::strcmp(algorithm.name, "mpi") == 0) return algorithm;
  }
  throw std::logic_error("no such algorithm");
}

// One rank of a collective.
struct CollectiveRank {
  CollectiveRank(FakeJob& job, int number)
      : mpi(job, number),
        comm(number, std::vector<std::vector<Link*>>(static_cast<std::size_t>(job.size)), nullptr) {
    comm.set_mpi(&mpi);
  }

  FakeMpi mpi;
  Comm comm;
  Call call;
  Data input;
  Data output;
  Sizes send_bytes;
  Sizes receive_bytes;
  std::unique_ptr<Layout> layout;
  std::unique_ptr<Fiber> fiber;
};

class CollectiveJob {
 public:
  explicit CollectiveJob(int ranks) : job_(ranks) {
    for (int i = 0; i < ranks; ++i) ranks_.push_back(std::make_unique<CollectiveRank>(job_, i));
  }
  CollectiveRank& rank(std::size_t i) { return *ranks_[i]; }
  int size() const { return job_.size; }

  void start(OpKind kind, std::size_t i) {
    CollectiveRank& rank = *ranks_[i];
    rank.call.kind = kind;
    rank.call.input = rank.input.data();
    rank.call.output = rank.output.data();
    rank.call.send_bytes = rank.send_bytes;
    rank.call.receive_bytes = rank.receive_bytes;
    const bool moves_parts = kind == OpKind::kAllgather || kind == OpKind::kAlltoall;
    rank.call.layout = moves_parts ? nullptr : rank.layout.get();
    rank.fiber = std::make_unique<Fiber>(by_mpi(kind).run(rank.comm, rank.call));
  }

  // Runs a collective on all ranks. Checks that outputs do not change before the last rank starts,
  // and that all ranks finish then.
  void run(OpKind kind) {
    const auto outputs = [&] {
      std::vector<Data> all;
      for (auto& rank : ranks_) all.push_back(rank->output);
      return all;
    };
    const auto before = outputs();
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      start(kind, i);
      const bool last = i + 1 == ranks_.size();
      CHECK(ranks_[i]->fiber->poll() == last);
      if (!last) {
        CHECK(ranks_[i]->fiber->polled());  // MPI does not ring doorbells
        CHECK(outputs() == before);
      }
      // MPI never gets the user's memory.
      const FakeJob::Arguments& given = ranks_[i]->mpi.last;
      for (const void* const memory : {given.input, static_cast<const void*>(given.output)}) {
        CHECK((memory == nullptr ||
               (memory != ranks_[i]->input.data() && memory != ranks_[i]->output.data())));
      }
    }
    for (auto& rank : ranks_) CHECK(rank->fiber->poll());
  }

 private:
  FakeJob job_;
  std::vector<std::unique_ptr<CollectiveRank>> ranks_;
};

Data random_bytes(std::mt19937_64& random, std::size_t bytes) {
  Data data(bytes);
  for (std::byte& byte : data) byte = static_cast<std::byte>(random());
  return data;
}

// Draws sizes of parts: often 0, and always 0 if `empty`.
struct Given {
  std::mt19937_64& random;
  bool empty = false;
  std::size_t size() { return empty || random() % 3 == 0 ? 0 : random() % 5000; }
};

std::size_t sum(const Sizes& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::size_t{0});
}

void check_allgather(CollectiveJob& job, Given given) {
  Sizes parts;
  Data wanted;
  for (std::size_t i = 0; i < static_cast<std::size_t>(job.size()); ++i) {
    parts.push_back(given.size());
    job.rank(i).input = random_bytes(given.random, parts.back());
    wanted.insert(wanted.end(), job.rank(i).input.begin(), job.rank(i).input.end());
  }
  for (std::size_t i = 0; i < parts.size(); ++i) {
    job.rank(i).receive_bytes = parts;
    job.rank(i).output.assign(sum(parts), std::byte{});
  }
  job.run(OpKind::kAllgather);
  for (std::size_t i = 0; i < parts.size(); ++i) CHECK(job.rank(i).output == wanted);
}

void check_alltoall(CollectiveJob& job, Given given) {
  const auto ranks = static_cast<std::size_t>(job.size());
  std::vector<Data> wanted(ranks);
  for (std::size_t to = 0; to < ranks; ++to) job.rank(to).receive_bytes.clear();
  for (std::size_t from = 0; from < ranks; ++from) {
    CollectiveRank& sender = job.rank(from);
    sender.send_bytes.clear();
    sender.input.clear();
    for (std::size_t to = 0; to < ranks; ++to) {
      const Data part = random_bytes(given.random, given.size());
      sender.send_bytes.push_back(part.size());
      job.rank(to).receive_bytes.push_back(part.size());
      sender.input.insert(sender.input.end(), part.begin(), part.end());
      wanted[to].insert(wanted[to].end(), part.begin(), part.end());
    }
  }
  for (std::size_t i = 0; i < ranks; ++i) job.rank(i).output.assign(wanted[i].size(), std::byte{});
  job.run(OpKind::kAlltoall);
  for (std::size_t i = 0; i < ranks; ++i) CHECK(job.rank(i).output == wanted[i]);
}

// Broadcasts two tensors, one of them in place.
void check_broadcast(CollectiveJob& job, Given given) {
  const auto ranks = static_cast<std::size_t>(job.size());
  const std::size_t root = given.random() % ranks;
  const std::size_t bytes = given.size();
  for (std::size_t i = 0; i < ranks; ++i) {
    CollectiveRank& rank = job.rank(i);
    rank.input = random_bytes(given.random, bytes);
    rank.output = random_bytes(given.random, bytes + 9);
    rank.layout = std::make_unique<Layout>(DType::kUInt8, 1.0);
    rank.layout->add(rank.input.data(), rank.output.data(), bytes);
    rank.layout->add(rank.output.data() + bytes, rank.output.data() + bytes, 9);
    rank.call.root = static_cast<int>(root);
  }
  Data wanted = job.rank(root).input;
  wanted.insert(wanted.end(), job.rank(root).output.end() - 9, job.rank(root).output.end());
  job.run(OpKind::kBroadcast);
  for (std::size_t i = 0; i < ranks; ++i) CHECK(job.rank(i).output == wanted);
}

// Averages small integers, whose sums are exact in any order.
void check_reducescatter(CollectiveJob& job, Given given) {
  const auto ranks = static_cast<std::size_t>(job.size());
  Sizes parts;
  for (std::size_t i = 0; i < ranks; ++i) parts.push_back(given.size() * sizeof(float));
  const std::size_t elements = sum(parts) / sizeof(float);
  std::vector<float> mean(elements, 0);
  for (std::size_t i = 0; i < ranks; ++i) {
    std::vector<float> values(elements);
    for (std::size_t at = 0; at < elements; ++at) {
      values[at] = static_cast<float>(given.random() % 100 * ranks);
      mean[at] += values[at] / static_cast<float>(ranks);
    }
    CollectiveRank& rank = job.rank(i);
    rank.input.resize(elements * sizeof(float));
    if (elements > 0) std::memcpy(rank.input.data(), values.data(), rank.input.size());
    rank.output.assign(parts[i], std::byte{});
    rank.receive_bytes = parts;
    rank.layout = std::make_unique<Layout>(DType::kFloat32, 1.0);
    rank.layout->add(rank.input.data(), nullptr, rank.input.size());
    rank.call.dtype = DType::kFloat32;
    rank.call.reduce_op = ReduceOp::kAverage;
    rank.call.finish = {.multiply = 1, .divide = static_cast<double>(ranks)};
  }
  job.run(OpKind::kReducescatter);
  std::size_t at = 0;
  for (std::size_t i = 0; i < ranks; ++i) {
    const Data& output = job.rank(i).output;
    CHECK((output.empty() || std::memcmp(output.data(), mean.data() + at, output.size()) == 0));
    at += output.size() / sizeof(float);
  }
}

}  // namespace

TEST_CASE("MPI's collectives give correct results for parts of any sizes") {
  const std::uint64_t seed = test_seed();
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  for (const int ranks : {2, 3, 5}) {
    CAPTURE(ranks);
    CollectiveJob job(ranks);
    for (int repeat = 0; repeat < 10; ++repeat) {
      const Given given{random, repeat == 0};
      check_allgather(job, given);
      check_alltoall(job, given);
      check_broadcast(job, given);
      check_reducescatter(job, given);
      job.run(OpKind::kBarrier);
    }
  }
}

TEST_CASE("every NaN in the result of a reduce-scatter is the canonical NaN") {
  CollectiveJob job(2);
  const std::vector<std::uint32_t> odd{0x7fc12345, 0xffc00001, 0x80000000, 0x3f800000};
  for (std::size_t i = 0; i < 2; ++i) {
    CollectiveRank& rank = job.rank(i);
    rank.input.resize(16);
    std::memcpy(rank.input.data(), odd.data(), 16);
    rank.output.resize(8);
    rank.receive_bytes = {8, 8};
    rank.layout = std::make_unique<Layout>(DType::kFloat32, 1.0);
    rank.layout->add(rank.input.data(), nullptr, 16);
    rank.call.dtype = DType::kFloat32;
  }
  job.run(OpKind::kReducescatter);
  const std::vector<std::vector<std::uint32_t>> wanted{{0x7fc00000, 0x7fc00000},
                                                       {0x80000000, 0x40000000}};
  for (std::size_t i = 0; i < 2; ++i) {
    CHECK(std::memcmp(job.rank(i).output.data(), wanted[i].data(), 8) == 0);
  }
}

TEST_CASE("memory that MPI may still use is not reused, nor are its tables of sizes") {
  CollectiveJob job(2);
  for (std::size_t i = 0; i < 2; ++i) {
    CollectiveRank& rank = job.rank(i);
    rank.send_bytes = rank.receive_bytes = {100, 100};
    rank.input.assign(200, std::byte{1});
    rank.output.assign(200, std::byte{2});
  }
  for (const OpKind kind : {OpKind::kAllgather, OpKind::kAlltoall}) {
    job.start(kind, 0);
    CHECK_FALSE(job.rank(0).fiber->poll());
    const FakeJob::Arguments had = job.rank(0).mpi.last;
    job.rank(0).fiber.reset();  // as after the failure of another rank
    ignore_leak(had.received.sizes);
    job.start(kind, 1);
    CHECK(job.rank(1).fiber->poll());  // MPI writes to rank 0's memory now
    CHECK(had.received.sizes[1] == 100);
    CHECK(job.rank(0).output == Data(200, std::byte{2}));
    job.run(kind);
    CHECK(job.rank(0).mpi.last.output != had.output);
    CHECK(job.rank(0).output == Data(200, std::byte{1}));
    job.rank(0).output.assign(200, std::byte{2});
  }
}

TEST_CASE("an MPI error fails the operation") {
  for (const OpKind kind : {OpKind::kAllgather, OpKind::kAlltoall, OpKind::kBarrier}) {
    CollectiveJob job(2);
    CollectiveRank& rank = job.rank(0);
    rank.mpi.fails = true;
    rank.send_bytes = rank.receive_bytes = {4, 4};
    rank.input.resize(8);
    rank.output.resize(8);
    job.start(kind, 0);
    CHECK_THROWS_AS(rank.fiber->poll(), Error);
    if (kind != OpKind::kBarrier) ignore_leak(rank.mpi.last.received.sizes);
  }
}

TEST_CASE("MPI is chosen only for operations that it supports and that do not exceed its counts") {
  FakeJob fake(2);
  CollectiveRank rank(fake, 0);
  const auto can = [&](OpKind kind) {
    rank.call.kind = kind;
    rank.call.receive_bytes = rank.receive_bytes;
    rank.call.send_bytes = rank.receive_bytes;
    return by_mpi(kind).can(rank.comm, rank.call);
  };
  constexpr std::size_t kMost = Mpi::kMostElements;
  rank.receive_bytes = {kMost - 5, 5};
  CHECK(can(OpKind::kAllgather));
  rank.receive_bytes = {kMost - 5, 6};
  CHECK_FALSE(can(OpKind::kAllgather));
  // The limit applies to what all ranks send, because this rank's part does not bound the others'.
  rank.call.all_bytes = kMost;
  CHECK(can(OpKind::kAlltoall));
  rank.call.all_bytes = kMost + 1;
  CHECK_FALSE(can(OpKind::kAlltoall));
  rank.call.dtype = DType::kInt64;
  rank.receive_bytes = {8 * kMost - 8, 8};
  CHECK(can(OpKind::kReducescatter));
  rank.receive_bytes = {8 * kMost, 8};
  CHECK_FALSE(can(OpKind::kReducescatter));

  rank.receive_bytes = {8, 8};
  rank.call.all_bytes = 0;
  rank.call.reduce_op = ReduceOp::kMin;
  CHECK(can(OpKind::kReducescatter));
  rank.call.dtype = DType::kFloat32;
  CHECK_FALSE(can(OpKind::kReducescatter));
  rank.call.reduce_op = ReduceOp::kSum;
  CHECK(can(OpKind::kReducescatter));
  rank.call.dtype = DType::kBFloat16;
  CHECK_FALSE(can(OpKind::kReducescatter));
  CHECK(can(OpKind::kAllgather));

  for (const OpKind kind : {OpKind::kAllreduce, OpKind::kAllgather, OpKind::kBroadcast,
                            OpKind::kAlltoall, OpKind::kReducescatter, OpKind::kBarrier}) {
    CAPTURE(op_kind_name(kind));
    rank.call.dtype = DType::kFloat32;
    CHECK(can(kind));
    rank.mpi.missing = kind;
    CHECK_FALSE(can(kind));
    rank.mpi.missing = OpKind::kJoin;
    rank.comm.set_mpi(nullptr);
    CHECK_FALSE(can(kind));
    rank.comm.set_mpi(&rank.mpi);
  }
}

TEST_CASE("a batch of a plan does not use MPI's barrier, which cannot be withdrawn") {
  FakeJob fake(2);
  CollectiveRank rank(fake, 0);
  const auto chosen = [&] { return std::string(choose_algorithm(rank.comm, Call{}, "mpi").name); };
  CHECK(chosen() == "mpi");
  rank.comm.begin({.set = 0, .epoch = 1, .batch = 1, .check = 0});
  CHECK(chosen() == "dissemination");
  rank.comm.begin({.set = 0, .epoch = 0, .batch = 2, .check = 0});
  CHECK(chosen() == "mpi");
  for (const Algorithm& algorithm : algorithms()) {
    if (std::strcmp(algorithm.name, "mpi") == 0) CHECK_FALSE(algorithm.defers_writes);
  }
}

TEST_CASE("each of MPI's collectives has its own cost") {
  FakeJob fake(2);
  FakeMpi mpi(fake, 0);
  Costs costs;
  costs.stream = {10, 0.001};
  costs.mpi.fill({1000, 1});
  costs.mpi[static_cast<std::size_t>(OpKind::kAllgather)] = {1, 1};
  Comm comm(0, {{}, {}}, nullptr, costs);
  comm.set_mpi(&mpi);
  const auto chosen = [&](OpKind kind, std::size_t bytes) {
    const Sizes parts{bytes, bytes};
    Call call;
    call.kind = kind;
    call.send_bytes = call.receive_bytes = parts;
    call.all_bytes = 4 * bytes;
    return std::string(choose_algorithm(comm, call, nullptr).name);
  };
  CHECK(chosen(OpKind::kAllgather, 1) == "mpi");
  CHECK(chosen(OpKind::kAllgather, 1000) == "ring");
  CHECK(chosen(OpKind::kAlltoall, 1) == "pairwise");
  CHECK(chosen(OpKind::kBarrier, 0) == "dissemination");
  CHECK(chosen(OpKind::kAlltoall, 1'000'000) == "pairwise");
}
