// Random batches of every operation with every algorithm on the CPU, in which a rank is late at any
// step, or fails at any step: no rank ends a batch of a plan, or writes to a tensor, before all
// have joined it, and nothing is read after a batch has been left.
#include <doctest/doctest.h>

#include <cstring>
#include <functional>
#include <numeric>

#include "collectives/collective.h"
#include "engine/executor.h"
#include "harness/cluster.h"
#include "harness/elements.h"
#include "harness/programs.h"
#include "harness/ranks.h"

using namespace horoplug;
using namespace horoplug::testing;

namespace {

// What all ranks do: operations of one kind that share a batch.
struct Work {
  std::size_t ranks = 2;
  std::size_t hosts = 1;
  Signature signature;  // without shapes
  std::string algorithm;
  bool in_place = false;
  struct Item {
    std::int64_t row_elements = 1;
    std::vector<std::int64_t> rows;                 // by rank
    std::vector<std::vector<std::int64_t>> splits;  // by rank
  };
  std::vector<Item> items;

  std::string describe() const {
    std::string text = std::string(op_kind_name(signature.op)) + " by " + algorithm + ", " +
                       std::to_string(ranks) + " ranks on " + std::to_string(hosts) + " hosts, " +
                       dtype_name(signature.dtype) + ", reduction " +
                       std::to_string(static_cast<int>(signature.reduce)) +
                       (in_place ? ", in place" : "");
    for (const Item& item : items) {
      text += "; rows of " + std::to_string(item.row_elements) + ":";
      for (const std::int64_t rows : item.rows) text += " " + std::to_string(rows);
    }
    return text;
  }
};

std::vector<const Algorithm*> algorithms_on_cpu() {
  std::vector<const Algorithm*> found;
  for (const Algorithm& algorithm : algorithms()) {
    const std::string medium = algorithm.medium;
    if (!algorithm.on_gpu && medium != "mpi" && medium != "self") found.push_back(&algorithm);
  }
  return found;
}

template <typename Values>
auto one_of(Random& random, const Values& values) {
  return values[static_cast<std::size_t>(below(random, static_cast<int>(std::size(values))))];
}

std::int64_t random_rows(Random& random, std::size_t ranks) {
  const auto size = static_cast<std::int64_t>(ranks);
  return one_of(random, std::to_array<std::int64_t>({0, 1, 2, size - 1, size, size + 1, 1000}));
}

Work random_work(Random& random) {
  Work work;
  const Algorithm& algorithm = *one_of(random, algorithms_on_cpu());
  const OpKind kind = algorithm.kind;
  work.algorithm = algorithm.name;
  const bool adasum = work.algorithm.starts_with("adasum");
  work.ranks =
      adasum ? std::size_t{2} << below(random, 3) : static_cast<std::size_t>(2 + below(random, 6));
  std::vector<std::size_t> hosts;
  for (std::size_t n = 1; n <= work.ranks; ++n) {
    if (work.ranks % n == 0) hosts.push_back(n);
  }
  // Where the algorithm can run.
  const std::string medium = algorithm.medium;
  work.hosts = medium == "shm" ? 1 : medium == "stream" ? work.ranks : one_of(random, hosts);
  work.in_place = chance(random, 2);
  Signature& signature = work.signature;
  signature.op = kind;
  signature.root = below(random, static_cast<int>(work.ranks));
  constexpr DType kDTypes[] = {DType::kInt32, DType::kFloat16, DType::kFloat32, DType::kFloat64};
  signature.dtype = kDTypes[adasum ? 1 + below(random, 3) : below(random, 4)];
  signature.reduce = adasum ? ReduceOp::kAdasum : ReduceOp::kSum;
  if (kind == OpKind::kBarrier) {
    work.items.resize(1);
    return work;
  }
  const OperationInfo& info = operation_info(kind);
  for (int count = 1 + below(random, 3); count > 0; --count) {
    Work::Item item;
    const bool large = chance(random, 12);
    item.row_elements = chance(random, 2) ? 1 : 8;
    const std::int64_t common = large ? 50'000 : random_rows(random, work.ranks);
    for (std::size_t rank = 0; rank < work.ranks; ++rank) {
      item.rows.push_back(info.rows_differ && !large ? random_rows(random, work.ranks) : common);
      auto& splits = item.splits.emplace_back();
      if (!info.takes_splits) continue;
      std::int64_t left = item.rows.back();
      for (std::size_t to = 0; to < work.ranks; ++to) {
        const bool last = to + 1 == work.ranks;
        splits.push_back(last || chance(random, 4) ? left : left / 2);
        left -= splits.back();
      }
    }
    work.items.push_back(std::move(item));
  }
  return work;
}

// Writes as few bytes as it likes, and tells a test what it reads.
class Slow final : public Stream {
 public:
  using Inspect = std::function<void(const iovec& part)>;
  Slow(std::unique_ptr<Stream> stream, Random& random, const Inspect& inspect)
      : stream_(std::move(stream)), random_(random), inspect_(inspect) {}
  std::size_t write(const iovec* parts, int count) override {
    for (int i = 0; i < count; ++i) {
      if (parts[i].iov_len > 0) inspect_(parts[i]);
    }
    if (chance(random_, 3)) return 0;
    iovec part = parts[0];
    part.iov_len = std::min<std::size_t>(part.iov_len, chance(random_, 2) ? 7 : 100'000);
    return stream_->write(&part, 1);
  }
  std::ptrdiff_t read(void* data, std::size_t bytes) override { return stream_->read(data, bytes); }
  void close_write() override { stream_->close_write(); }
  int fd() const override { return stream_->fd(); }

 private:
  std::unique_ptr<Stream> stream_;
  Random& random_;
  const Inspect& inspect_;
};

// The ranks, each with its part of the work.
class Job {
 public:
  Job(const Work& work, Random& random)
      : work_(work),
        ranks_(work.ranks, work.hosts,
               [&](std::unique_ptr<Stream> stream, std::size_t, std::size_t) {
                 return std::make_unique<Slow>(std::move(stream), random, inspect_);
               }) {
    for (std::size_t rank = 0; rank < work.ranks; ++rank) parts_.push_back(make_part(rank));
  }

  void start(std::size_t rank, const Channel& channel) {
    Part& part = parts_[rank];
    for (const OperationPtr& operation : part.batch.operations) operation->outcomes.clear();
    ranks_.comm(rank).begin(channel);
    part.fiber =
        std::make_unique<Fiber>(run_batch(ranks_.comm(rank), part.batch, work_.algorithm.c_str()));
    part.done = false;
  }
  bool poll(std::size_t rank) {
    Part& part = parts_[rank];
    if (!part.fiber || part.done) return false;
    part.done = part.fiber->poll();
    if (part.done) ranks_.comm(rank).end();
    return part.fiber->advanced();
  }
  // Until nobody gets any further.
  void run() {
    std::uint64_t moved = 0;
    for (int idle = 0; idle < 40; ++idle) {
      ranks_.pump();
      if (std::exchange(moved, ranks_.bytes_moved()) != ranks_.bytes_moved()) idle = 0;
      for (std::size_t rank = 0; rank < parts_.size(); ++rank) {
        if (poll(rank)) idle = 0;
      }
    }
  }
  // A random part of that.
  void run_a_little(Random& random) {
    for (int turns = below(random, 60); turns > 0; --turns) {
      const auto rank = static_cast<std::size_t>(below(random, static_cast<int>(parts_.size())));
      ranks_.mesh(rank).pump();
      poll(rank);
    }
  }
  bool is_done(std::size_t rank) const { return parts_[rank].done; }
  void leave(std::size_t rank) { parts_[rank].fiber.reset(); }

  Ranks& ranks() { return ranks_; }
  std::vector<std::vector<std::byte>>& memory(std::size_t rank) { return parts_[rank].memory; }
  bool is_untouched(std::size_t rank) const { return parts_[rank].memory == parts_[rank].original; }
  // From now on the streams tell what they read.
  void inspect(Slow::Inspect inspect) { inspect_ = std::move(inspect); }

  // The results of all ranks.
  std::vector<std::vector<std::byte>> results() const {
    std::vector<std::vector<std::byte>> all;
    for (const Part& part : parts_) {
      for (const OperationPtr& operation : part.batch.operations) {
        for (const TensorOutcome& outcome : operation->outcomes) {
          const auto* const data = static_cast<const std::byte*>(outcome.data);
          all.emplace_back(data, data + outcome.bytes);
        }
      }
    }
    return all;
  }

 private:
  struct Part {
    std::vector<std::vector<std::byte>> memory;  // inputs and outputs
    std::vector<std::vector<std::byte>> original;
    Batch batch;
    std::unique_ptr<Fiber> fiber;
    bool done = false;
  };

  Part make_part(std::size_t rank) const {
    Part part;
    std::vector<int> everyone(work_.ranks);
    std::iota(everyone.begin(), everyone.end(), 0);
    part.batch.number = 1;
    for (std::size_t i = 0; i < work_.items.size(); ++i) {
      const Work::Item& item = work_.items[i];
      auto operation = std::make_shared<Operation>();
      operation->members = make_members(0, everyone, static_cast<int>(rank));
      operation->name = std::to_string(i);
      operation->signature = work_.signature;
      part.batch.operations.push_back(operation);
      if (item.rows.empty()) continue;
      operation->signature.shapes = {{item.rows[rank], item.row_elements}};
      const bool is_root = work_.signature.root == static_cast<int>(rank);
      if (!item.splits[rank].empty()) operation->splits = item.splits[rank];
      if (work_.signature.op == OpKind::kScatter && !is_root)
        operation->splits.assign(work_.ranks, 0);
      const auto elements = static_cast<std::size_t>(item.rows[rank] * item.row_elements);
      // Room for one element, so that empty tensors have an address.
      part.memory.push_back(make_array(work_.signature.dtype, elements + 1, [&](std::size_t at) {
        return static_cast<double>(rank + i + at % 5 + 1);
      }));
      TensorArgument tensor{part.memory.back().data(), nullptr};
      if (operation_info(work_.signature.op).output == OpOutput::kSubmitted) {
        if (!work_.in_place) part.memory.emplace_back(part.memory.back().size(), std::byte{9});
        tensor.output = part.memory.back().data();
      }
      operation->tensors = {tensor};
    }
    part.original = part.memory;
    return part;
  }

  const Work& work_;
  Slow::Inspect inspect_ = [](const iovec&) {};
  Ranks ranks_;
  std::vector<Part> parts_;
};

constexpr Channel kPlanned{.set = 0, .epoch = 1, .batch = 1, .check = 7};
constexpr Channel kNegotiated{.set = 0, .epoch = 0, .batch = 1, .check = 8};

std::vector<std::vector<std::byte>> expected_results(const Work& work, Random& random) {
  Job job(work, random);
  for (std::size_t rank = 0; rank < work.ranks; ++rank) job.start(rank, kNegotiated);
  job.run();
  for (std::size_t rank = 0; rank < work.ranks; ++rank) REQUIRE(job.is_done(rank));
  return job.results();
}

void for_random_work(const std::function<void(const Work& work, Random& random)>& check) {
  const std::uint64_t seed = test_seed();
  for (int round = 0; round < (kSanitized ? 100 : 300); ++round) {
    Random random(seed + static_cast<std::uint64_t>(round));
    const Work work = random_work(random);
    CAPTURE(seed);
    CAPTURE(round);
    CAPTURE(work.describe());
    check(work, random);
  }
}

}  // namespace

TEST_CASE("whichever rank is late, at any step and with any shapes, a plan's batch waits for it") {
  for_random_work([](const Work& work, Random& random) {
    const auto expected = expected_results(work, random);

    Job job(work, random);
    std::vector<std::size_t> order(work.ranks);
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::shuffle(order.begin(), order.end(), random);
    const std::size_t late = order.back();
    for (std::size_t i = 0; i + 1 < order.size(); ++i) {
      job.start(order[i], kPlanned);
      job.run_a_little(random);
    }
    if (chance(random, 2)) job.run();
    for (std::size_t rank = 0; rank < work.ranks; ++rank) {
      CHECK(!job.is_done(rank));
      CHECK(job.is_untouched(rank));
    }
    Channel channel = kPlanned;
    if (chance(random, 2)) {
      // The plan ends instead, and the ranks negotiate the operations.
      channel = kNegotiated;
      for (const std::size_t rank : order) {
        if (rank == late) continue;
        job.leave(rank);
        job.ranks().comm(rank).withdraw();
      }
      for (const std::size_t rank : order) {
        job.ranks().comm(rank).drop(kPlanned);
        job.ranks().comm(rank).resume();
        if (rank != late) job.start(rank, channel);
      }
    }
    job.start(late, channel);
    job.run();
    for (std::size_t rank = 0; rank < work.ranks; ++rank) REQUIRE(job.is_done(rank));
    CHECK(job.results() == expected);
  });
}

TEST_CASE("no memory of a batch is read or written after its coroutine was destroyed") {
  for_random_work([](const Work& work, Random& random) {
    Job job(work, random);
    for (std::size_t rank = 0; rank < work.ranks; ++rank) job.start(rank, kNegotiated);
    for (int turns = below(random, 10); turns > 0; --turns) job.run_a_little(random);

    // One rank loses its peers: its collective throws, wherever it waits. This is how an engine
    // ends.
    const auto failing = static_cast<std::size_t>(below(random, static_cast<int>(work.ranks)));
    if (chance(random, 2)) {
      for (std::size_t peer = 0; peer < work.ranks; ++peer) {
        if (peer == failing || chance(random, 2)) continue;
        for (Link* lane : job.ranks().mesh(failing).lanes(static_cast<int>(peer)))
          lane->fail("it is gone");
      }
      try {
        job.poll(failing);
      } catch (const PeerError&) {
      }
    }
    job.leave(failing);
    // The program continues at once, with the same memory.
    auto& memory = job.memory(failing);
    for (auto& array : memory) std::fill(array.begin(), array.end(), std::byte{0xEE});
    const auto before = memory;
    int read = 0;
    job.inspect([&](const iovec& part) {
      const auto* const data = static_cast<const std::byte*>(part.iov_base);
      for (const auto& array : memory) {
        if (data + part.iov_len > array.data() && data < array.data() + array.size()) ++read;
      }
    });
    for (int turns = 0; turns < 200; ++turns) job.ranks().pump();
    CHECK(read == 0);
    CHECK(memory == before);
  });
}
