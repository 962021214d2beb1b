// Random batches of every operation with every algorithm on the CPU, in which a rank is late at any
// step, or fails at any step: no rank ends a batch of a plan, or writes to a tensor, before all
// have joined it, and nothing is read after a batch has been left.
#include <doctest/doctest.h>

#include <cstring>
#include <functional>
#include <numeric>

#include "collectives/collective.h"
#include "engine/execution/executor.h"
#include "harness/cluster.h"
#include "harness/elements.h"
#include "harness/programs.h"
#include "harness/ranks.h"

using namespace horoplug;
using namespace horoplug::testing;

namespace {

// The work of all ranks: operations of one kind that share a batch.
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
  for (std::size_t n = 1; n <= work.ranks; ++n) hosts.push_back(n);
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

// Writes a random number of bytes at a time, and reports to a test which memory it reads.
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
  Traits traits() const override { return stream_->traits(); }

 private:
  std::unique_ptr<Stream> stream_;
  Random& random_;
  const Inspect& inspect_;
};

// One rank's share of a Work: its tensors, its batch and the coroutine that runs it.
struct Part {
  std::vector<std::vector<std::byte>> memory;  // inputs and outputs
  std::vector<std::vector<std::byte>> original;
  Batch batch;
  std::unique_ptr<Fiber> fiber;
  bool done = false;
};

Part make_part(const Work& work, std::size_t rank) {
  Part part;
  std::vector<int> everyone(work.ranks);
  std::iota(everyone.begin(), everyone.end(), 0);
  part.batch.number = 1;
  for (std::size_t i = 0; i < work.items.size(); ++i) {
    const Work::Item& item = work.items[i];
    auto operation = std::make_shared<Operation>();
    operation->members = make_members(0, everyone, static_cast<int>(rank));
    Signature signature = work.signature;
    if (!item.rows.empty()) signature.shapes = {{item.rows[rank], item.row_elements}};
    operation->identity = make_identity(std::to_string(i), std::move(signature));
    part.batch.operations.push_back(operation);
    if (item.rows.empty()) continue;
    const bool is_root = work.signature.root == static_cast<int>(rank);
    if (!item.splits[rank].empty()) operation->splits = item.splits[rank];
    if (work.signature.op == OpKind::kScatter && !is_root) operation->splits.assign(work.ranks, 0);
    const auto elements = static_cast<std::size_t>(item.rows[rank] * item.row_elements);
    // Room for one element, so that empty tensors have an address.
    part.memory.push_back(make_array(work.signature.dtype, elements + 1, [&](std::size_t at) {
      return static_cast<double>(rank + i + at % 5 + 1);
    }));
    TensorArgument tensor{part.memory.back().data(), nullptr};
    if (operation_info(work.signature.op).output == OpOutput::kSubmitted) {
      if (!work.in_place) part.memory.emplace_back(part.memory.back().size(), std::byte{9});
      tensor.output = part.memory.back().data();
    }
    operation->tensors = {tensor};
  }
  part.original = part.memory;
  return part;
}

// The results of all operations of a part.
void add_results(const Part& part, std::vector<std::vector<std::byte>>& all) {
  for (const OperationPtr& operation : part.batch.operations) {
    for (const TensorOutcome& outcome : operation->outcomes) {
      const auto* const data = static_cast<const std::byte*>(outcome.data);
      all.emplace_back(data, data + outcome.bytes);
    }
  }
}

// Sets backlog limits of few bytes, so that nearly every frame that arrives early makes its sender
// hold. No algorithm may depend on frames that arrive early.
void limit_backlogs(Ranks& ranks, Random& random) {
  const auto limit = static_cast<std::uint64_t>(below(random, 3000));
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    for (std::size_t peer = 0; peer < ranks.size(); ++peer) {
      for (Link* lane : ranks.mesh(rank).lanes(static_cast<int>(peer))) {
        lane->set_backlog_limit(limit);
      }
    }
  }
}

// The ranks, each with its part of the work.
class RandomJob {
 public:
  RandomJob(const Work& work, Random& random)
      : work_(work),
        ranks_(work.ranks, work.hosts,
               [&](std::unique_ptr<Stream> stream, std::size_t, std::size_t) {
                 return std::make_unique<Slow>(std::move(stream), random, inspect_);
               }) {
    for (std::size_t rank = 0; rank < work.ranks; ++rank) parts_.push_back(make_part(work, rank));
    if (chance(random, 2)) limit_backlogs(ranks_, random);
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
  // Runs the ranks until none makes progress.
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
  // Runs the ranks for a random number of rounds.
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
  // From now on the streams report which memory they read.
  void inspect(Slow::Inspect inspect) { inspect_ = std::move(inspect); }

  // The results of all ranks.
  std::vector<std::vector<std::byte>> results() const {
    std::vector<std::vector<std::byte>> all;
    for (const Part& part : parts_) add_results(part, all);
    return all;
  }

 private:
  const Work& work_;
  Slow::Inspect inspect_ = [](const iovec&) {};
  Ranks ranks_;
  std::vector<Part> parts_;
};

constexpr Channel kPlanned{.set = 0, .epoch = 1, .batch = 1, .check = 7};
constexpr Channel kNegotiated{.set = 0, .epoch = 0, .batch = 1, .check = 8};

std::vector<std::vector<std::byte>> expected_results(const Work& work, Random& random) {
  RandomJob job(work, random);
  for (std::size_t rank = 0; rank < work.ranks; ++rank) job.start(rank, kNegotiated);
  job.run();
  for (std::size_t rank = 0; rank < work.ranks; ++rank) REQUIRE(job.is_done(rank));
  return job.results();
}

void for_random_work(const std::function<void(const Work& work, Random& random)>& check) {
  const std::uint64_t seed = test_seed();
  for (int round = 0; round < (kSlowedDown ? 100 : 300); ++round) {
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

    RandomJob job(work, random);
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
    RandomJob job(work, random);
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

namespace {

// A process set whose ranks run the same batches one after the other.
class Set {
 public:
  Set(std::uint32_t number, Ranks& ranks, Random& random) : number_(number) {
    do {
      works_ = {random_work(random)};
    } while (!suits(works_[0], ranks.size()));
    for (int more = below(random, 6); more > 0;) {
      Work work = random_work(random);
      if (!suits(work, ranks.size()) || work.ranks != works_[0].ranks) continue;
      works_.push_back(std::move(work));
      --more;
    }
    std::vector<std::size_t> everyone(ranks.size());
    std::iota(everyone.begin(), everyone.end(), std::size_t{0});
    std::shuffle(everyone.begin(), everyone.end(), random);
    everyone.resize(works_[0].ranks);
    for (std::size_t i = 0; i < everyone.size(); ++i) {
      Member& member = members_.emplace_back();
      member.rank = everyone[i];
      std::vector<std::vector<Link*>> lanes;
      for (const std::size_t peer : everyone) {
        lanes.push_back(ranks.mesh(member.rank).lanes(static_cast<int>(peer)));
      }
      member.comm = std::make_unique<Comm>(static_cast<int>(i), std::move(lanes), nullptr);
      for (const Work& work : works_) member.parts.push_back(make_part(work, i));
    }
  }

  // Runs the batches of a rank as far as possible.
  void poll(std::size_t rank) {
    for (Member& member : members_) {
      if (member.rank != rank) continue;
      for (; member.next < works_.size(); ++member.next) {
        if (!member.fiber) {
          const std::uint64_t batch = member.next + 1;
          member.comm->begin({.set = number_, .epoch = 0, .batch = batch, .check = batch});
          member.fiber =
              std::make_unique<Fiber>(run_batch(*member.comm, member.parts[member.next].batch,
                                                works_[member.next].algorithm.c_str()));
        }
        if (!member.fiber->poll()) return;
        member.fiber.reset();
        member.comm->end();
      }
    }
  }

  void check(Random& random) const {
    for (const Member& member : members_) REQUIRE(member.next == works_.size());
    for (std::size_t i = 0; i < works_.size(); ++i) {
      CAPTURE(works_[i].describe());
      std::vector<std::vector<std::byte>> results;
      for (const Member& member : members_) add_results(member.parts[i], results);
      CHECK(results == expected_results(works_[i], random));
    }
  }

 private:
  struct Member {
    std::size_t rank = 0;
    std::unique_ptr<Comm> comm;
    std::vector<Part> parts;  // by batch
    std::size_t next = 0;
    std::unique_ptr<Fiber> fiber;
  };

  static bool suits(const Work& work, std::size_t ranks) {
    return work.hosts == work.ranks && work.ranks <= ranks;
  }

  const std::uint32_t number_;
  std::vector<Work> works_;
  std::vector<Member> members_;
};

}  // namespace

TEST_CASE("batches of several process sets end with any late rank and tiny backlog limits") {
  const std::uint64_t seed = test_seed();
  for (int round = 0; round < (kSlowedDown ? 15 : 60); ++round) {
    Random random(seed + static_cast<std::uint64_t>(round));
    CAPTURE(seed);
    CAPTURE(round);
    const Slow::Inspect inspect = [](const iovec&) {};
    const auto size = std::size_t{2} + static_cast<std::size_t>(below(random, 3));
    Ranks ranks(size, size, [&](std::unique_ptr<Stream> stream, std::size_t, std::size_t) {
      return std::make_unique<Slow>(std::move(stream), random, inspect);
    });
    limit_backlogs(ranks, random);
    std::vector<std::unique_ptr<Set>> sets;
    for (int number = 0; number < 1 + below(random, 3); ++number) {
      sets.push_back(std::make_unique<Set>(static_cast<std::uint32_t>(number), ranks, random));
    }
    const auto late = static_cast<std::size_t>(below(random, static_cast<int>(size)));
    for (int turns = below(random, 2000); turns > 0; --turns) {
      const auto rank = static_cast<std::size_t>(below(random, static_cast<int>(size)));
      ranks.mesh(rank).pump();
      if (rank != late)
        sets[static_cast<std::size_t>(below(random, static_cast<int>(sets.size())))]->poll(rank);
    }
    std::uint64_t moved = 0;
    for (int idle = 0; idle < 40; ++idle) {
      ranks.pump();
      if (std::exchange(moved, ranks.bytes_moved()) != ranks.bytes_moved()) idle = 0;
      for (const auto& set : sets) {
        for (std::size_t rank = 0; rank < size; ++rank) set->poll(rank);
      }
    }
    for (const auto& set : sets) set->check(random);
    for (std::size_t rank = 0; rank < size; ++rank) {
      for (std::size_t peer = 0; peer < size; ++peer) {
        for (Link* lane : ranks.mesh(rank).lanes(static_cast<int>(peer))) {
          CHECK(lane->backlog() == 0);
          CHECK(!lane->busy());
        }
      }
    }
  }
}
