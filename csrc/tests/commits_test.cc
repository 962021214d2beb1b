// Algorithms that say so leave outputs as they are until every rank takes part: all ranks but one
// run a collective as far as it goes, in place, and find their data unchanged; then the last one
// comes.
#include <doctest/doctest.h>

#include <cstring>
#include <numeric>

#include "cluster.h"
#include "collectives/collective.h"
#include "transport/inproc/pipe.h"
#include "transport/mesh.h"

using namespace horoplug;
using namespace horoplug::testing;

namespace {

// The ranks of a set, all on this thread, over in-memory streams; on one host if `shared`.
class Ranks {
 public:
  Ranks(std::size_t ranks, bool shared) {
    std::vector<std::vector<std::vector<std::unique_ptr<Stream>>>> lanes(ranks);
    std::vector<std::shared_ptr<Doorbell>> bells;
    std::vector<Arena> arenas;
    for (auto& of_rank : lanes) {
      of_rank.resize(ranks);
      bells.push_back(std::make_shared<Doorbell>());
      if (shared) arenas.emplace_back(Segment::allocate(Arena::kSegmentBytes));
    }
    for (std::size_t a = 0; a < ranks; ++a) {
      for (std::size_t b = a + 1; b < ranks; ++b) {
        for (int lane = 0; lane < 2; ++lane) {
          auto pair = make_inproc_pipe(bells[a], bells[b]);
          lanes[a][b].push_back(std::move(pair.first));
          lanes[b][a].push_back(std::move(pair.second));
        }
      }
    }
    std::vector<int> global(ranks);
    std::iota(global.begin(), global.end(), 0);
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      const int me = static_cast<int>(rank);
      meshes_.push_back(
          std::make_unique<Mesh>(std::move(lanes[rank]), bells[rank], [](int, const Bytes&) {}));
      groups_.push_back(shared ? std::make_unique<SharedGroup>(me, arenas, bells, global)
                               : nullptr);
      std::vector<std::vector<Link*>> links;
      for (const int peer : global) links.push_back(meshes_.back()->lanes(peer));
      comms_.push_back(std::make_unique<Comm>(me, std::move(links), groups_.back().get()));
    }
  }

  Comm& comm(std::size_t rank) { return *comms_[rank]; }
  void pump() {
    for (auto& mesh : meshes_) mesh->pump();
  }

 private:
  std::vector<std::unique_ptr<Mesh>> meshes_;
  std::vector<std::unique_ptr<SharedGroup>> groups_;
  std::vector<std::unique_ptr<Comm>> comms_;
};

struct Work {
  std::vector<float> data;
  std::vector<float> before;
  Layout layout{DType::kFloat32, 1.0};
  Call call;
  std::unique_ptr<Fiber> fiber;
};

void check_commits(const Algorithm& algorithm, std::size_t ranks, std::size_t count,
                   std::size_t missing) {
  Ranks job(ranks, std::strcmp(algorithm.medium, "shm") == 0);
  std::vector<std::unique_ptr<Work>> works;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    auto work = std::make_unique<Work>();
    work->data.resize(count);
    for (std::size_t i = 0; i < count; ++i) work->data[i] = static_cast<float>(rank + 1 + i % 5);
    work->before = work->data;
    work->layout.add(work->data.data(), work->data.data(), count * sizeof(float));
    work->call.kind = OpKind::kAllreduce;
    work->call.dtype = DType::kFloat32;
    work->call.layout = &work->layout;
    work->call.reduce =
        kernels().reduce[static_cast<int>(ReduceOp::kSum)][static_cast<int>(DType::kFloat32)];
    works.push_back(std::move(work));
  }
  const auto start = [&](std::size_t rank) {
    job.comm(rank).begin({.set = 0, .epoch = 0, .batch = 1, .check = 7});
    works[rank]->fiber = std::make_unique<Fiber>(algorithm.run(job.comm(rank), works[rank]->call));
  };
  // Until nobody gets any further; true if all have come to the end.
  const auto run = [&] {
    bool all = true;
    for (int idle = 0; idle < 20; ++idle) {
      all = true;
      job.pump();
      for (auto& work : works) {
        if (!work->fiber) continue;
        all &= work->fiber->poll();
        if (work->fiber->advanced()) idle = 0;
      }
    }
    return all;
  };
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    if (rank != missing) start(rank);
  }
  CHECK(!run());
  for (const auto& work : works) CHECK(work->data == work->before);
  start(missing);
  CHECK(run());
  const auto sum = static_cast<float>(ranks * (ranks + 1) / 2);
  for (const auto& work : works) {
    CHECK(work->data.front() == sum);
    CHECK(work->data.back() == sum + static_cast<float>(ranks * ((count - 1) % 5)));
  }
}

}  // namespace

TEST_CASE("outputs stay untouched until every rank takes part") {
  int checked = 0;
  for (const Algorithm& algorithm : algorithms()) {
    const std::string name = algorithm.name;
    if (algorithm.kind != OpKind::kAllreduce || !algorithm.commits) continue;
    if (name != "direct" && name != "pairwise" && name != "doubling") continue;
    ++checked;
    for (const std::size_t ranks : {2U, 3U, 5U, 8U}) {
      for (const std::size_t count : {1U, 1000U, 300'001U, 1'500'000U}) {
        for (const std::size_t missing : {std::size_t{0}, ranks / 2, ranks - 1}) {
          CAPTURE(name);
          CAPTURE(ranks);
          CAPTURE(count);
          CAPTURE(missing);
          check_commits(algorithm, ranks, count, missing);
        }
      }
    }
  }
  CHECK(checked == 3);
}
