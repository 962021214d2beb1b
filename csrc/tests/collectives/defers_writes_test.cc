// Algorithms with defers_writes leave outputs unchanged until every rank takes part: all ranks but
// one run an in-place collective as far as possible and check that their data is unchanged; then
// the last rank joins.
#include <doctest/doctest.h>

#include <cstring>
#include <functional>
#include <set>

#include "collectives/collective.h"
#include "harness/cluster.h"
#include "harness/elements.h"
#include "harness/ranks.h"

using namespace horoplug;
using namespace horoplug::testing;

namespace {

// An allreduce of one algorithm on all ranks, in place.
class Allreduce {
 public:
  Allreduce(const Algorithm& algorithm, std::size_t ranks, std::size_t count)
      : algorithm_(algorithm), job_(ranks, std::strcmp(algorithm.medium, "shm") == 0 ? 1 : ranks) {
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      auto work = std::make_unique<Work>();
      work->data.resize(count * sizeof(float));
      work->layout.add(work->data.data(), work->data.data(), work->data.size());
      work->call.kind = OpKind::kAllreduce;
      work->call.dtype = DType::kFloat32;
      work->call.layout = &work->layout;
      work->call.reduce =
          kernels().reduce[static_cast<int>(ReduceOp::kSum)][static_cast<int>(DType::kFloat32)];
      works_.push_back(std::move(work));
    }
    fill(0);
  }

  Ranks& job() { return job_; }
  std::size_t ranks() const { return works_.size(); }

  void fill(std::size_t salt) {
    salt_ = salt;
    for (std::size_t rank = 0; rank < works_.size(); ++rank) {
      auto& data = works_[rank]->data;
      std::memcpy(data.data(), input_of(rank).data(), data.size());
    }
  }
  void start(std::size_t rank, const Channel& channel) {
    job_.comm(rank).begin(channel);
    works_[rank]->fiber =
        std::make_unique<Fiber>(algorithm_.run(job_.comm(rank), works_[rank]->call));
  }
  void poll(std::size_t rank) { works_[rank]->fiber->poll(); }
  void withdraw(std::size_t rank) {
    works_[rank]->fiber.reset();
    job_.comm(rank).withdraw();
  }
  // Runs the ranks until none makes progress; returns true if all have finished.
  bool run() {
    bool all = true;
    for (int idle = 0; idle < 20; ++idle) {
      all = true;
      job_.pump();
      for (auto& work : works_) {
        if (!work->fiber) continue;
        all &= work->fiber->poll();
        if (work->fiber->advanced()) idle = 0;
      }
    }
    return all;
  }
  void check_untouched() {
    for (std::size_t rank = 0; rank < works_.size(); ++rank) {
      CHECK(difference(DType::kFloat32, works_[rank]->data, input_of(rank)) == "");
    }
  }
  void check_sums() const {
    const std::size_t ranks = works_.size();
    const std::vector<std::byte> sums =
        array([&](std::size_t i) { return ranks * (ranks + 1) / 2 + ranks * (salt_ + i % 5); });
    for (const auto& work : works_) CHECK(difference(DType::kFloat32, work->data, sums) == "");
  }

 private:
  struct Work {
    std::vector<std::byte> data;
    Layout layout{DType::kFloat32, 1.0};
    Call call;
    std::unique_ptr<Fiber> fiber;
  };
  template <typename Value>
  std::vector<std::byte> array(Value&& value) const {
    const std::size_t count = works_.front()->data.size() / sizeof(float);
    return make_array(DType::kFloat32, count, 5,
                      [&](std::size_t i) { return static_cast<double>(value(i)); });
  }
  std::vector<std::byte> input_of(std::size_t rank) const {
    return array([&](std::size_t i) { return salt_ + rank + 1 + i % 5; });
  }

  const Algorithm& algorithm_;
  Ranks job_;
  std::vector<std::unique_ptr<Work>> works_;
  std::size_t salt_ = 0;
};

void check_defers_writes(Allreduce& reduction, std::size_t missing) {
  const Channel channel{.set = 0, .epoch = 0, .batch = 1, .check = 7};
  for (std::size_t rank = 0; rank < reduction.ranks(); ++rank) {
    if (rank != missing) reduction.start(rank, channel);
  }
  CHECK(!reduction.run());
  reduction.check_untouched();
  reduction.start(missing, channel);
  CHECK(reduction.run());
  reduction.check_sums();
}

// A batch of a plan that one rank has not joined is withdrawn; then all ranks run another batch
// with other values. `far`: before that, the batch runs as far as possible without the missing
// rank; otherwise no byte moves.
void check_withdrawal(Allreduce& reduction, std::size_t missing, bool far) {
  const Channel joined{.set = 0, .epoch = 1, .batch = 1, .check = 7};
  for (std::size_t rank = 0; rank < reduction.ranks(); ++rank) {
    if (rank == missing) continue;
    reduction.start(rank, joined);
    if (!far) reduction.poll(rank);
  }
  if (far) CHECK(!reduction.run());
  reduction.check_untouched();
  for (std::size_t rank = 0; rank < reduction.ranks(); ++rank) {
    if (rank != missing) reduction.withdraw(rank);
  }
  // A message that has not begun to leave is never sent.
  if (!far) {
    reduction.job().pump();
    CHECK(reduction.job().bytes_moved() == 0);
  }
  reduction.fill(100);
  for (std::size_t rank = 0; rank < reduction.ranks(); ++rank) {
    reduction.job().comm(rank).drop(joined);
    reduction.job().comm(rank).resume();
  }
  for (std::size_t rank = 0; rank < reduction.ranks(); ++rank) {
    reduction.start(rank, {.set = 0, .epoch = 0, .batch = 1, .check = 8});
    reduction.poll(rank);
  }
  CHECK(reduction.run());
  reduction.check_sums();
}

// Each algorithm that defers its writes, on several numbers of ranks, sizes and missing ranks.
void for_each_case(const std::function<void(Allreduce& reduction, std::size_t missing)>& check) {
  int checked = 0;
  for (const Algorithm& algorithm : algorithms()) {
    const std::string name = algorithm.name;
    if (algorithm.kind != OpKind::kAllreduce || !algorithm.defers_writes) continue;
    if (name != "lines" && name != "direct" && name != "pairwise" && name != "doubling") continue;
    ++checked;
    for (const std::size_t ranks : {2U, 3U, 5U, 8U}) {
      for (const std::size_t count : {1U, 1000U, 300'001U, 1'500'000U}) {
        if (name == "lines" && count > 1000) continue;
        // Sanitizers are slow with large arrays.
        if (kSlowedDown && (count > 1'000'000 || (count > 1000 && ranks != 2 && ranks != 5)))
          continue;
        for (const std::size_t missing : std::set{std::size_t{0}, ranks / 2, ranks - 1}) {
          CAPTURE(name);
          CAPTURE(ranks);
          CAPTURE(count);
          CAPTURE(missing);
          Allreduce reduction(algorithm, ranks, count);
          check(reduction, missing);
        }
      }
    }
  }
  CHECK(checked == 4);
}

}  // namespace

TEST_CASE("outputs stay untouched until every rank takes part") {
  for_each_case(check_defers_writes);
}

TEST_CASE("a batch that not all ranks have joined is withdrawn without a trace") {
  for (const bool far : {false, true}) {
    CAPTURE(far);
    for_each_case([far](Allreduce& reduction, std::size_t missing) {
      check_withdrawal(reduction, missing, far);
    });
  }
}
