// Tests of the negotiator under the random scheduler of a simulated job.
#include "controller/negotiator.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <set>

#include "harness/cluster.h"
#include "harness/simulated_job.h"

using namespace horoplug;
using namespace horoplug::testing;

namespace {

SimulatedJob job_without_plans(const std::vector<int>& hosts, Negotiator::Options options = {}) {
  options.plan_after = 0;  // plan_test.cc tests plans
  return {hosts, options};
}

void same_decisions_everywhere(SimulatedJob& simulation) {
  const auto& first = simulation[0].decided;
  for (int rank = 1; rank < simulation.size(); ++rank) {
    const auto& other = simulation[rank].decided;
    REQUIRE(other.size() == first.size());
    for (std::size_t i = 0; i < first.size(); ++i) {
      const bool same = other[i].kind == first[i].kind && other[i].batch == first[i].batch &&
                        names_of(other[i].operations) == names_of(first[i].operations) &&
                        other[i].status.message == first[i].status.message;
      if (!same) FAIL("decision " << i << " of rank " << rank << " is not that of rank 0");
    }
  }
}

// The operations of a rank: several steps over the same names, each in a different order.
struct Operations {
  std::vector<std::vector<std::pair<std::string, Signature>>> steps;
};

}  // namespace

TEST_CASE("ranks that submit in any order agree, and every operation runs exactly once") {
  const std::uint64_t seed = test_seed();
  for (int round = 0; round < (kSlowedDown ? 50 : 400); ++round) {
    CAPTURE(seed);
    CAPTURE(round);
    Random random(seed + static_cast<std::uint64_t>(round));
    const int ranks = 1 + below(random, 20);
    Negotiator::Options options;
    options.fusion_threshold = below(random, 3) == 0 ? 0 : 4 * (1 + below(random, 2000));
    options.cache_capacity =
        static_cast<std::size_t>(below(random, 3) == 0 ? below(random, 6) : 100);
    options.max_outstanding = 1 + below(random, 3);
    SimulatedJob simulation = job_without_plans(random_hosts(random, ranks), options);

    // Common to all ranks: names and shapes, which may change from step to step. A few operations
    // disagree.
    const int names = 1 + below(random, 12);
    std::vector<Operations> programs(static_cast<std::size_t>(ranks));
    std::map<std::string, int> runs_expected;
    std::map<std::string, int> errors_expected;
    for (int step = 0; step < 5; ++step) {
      for (auto& program : programs) program.steps.emplace_back();
      for (int n = 0; n < names; ++n) {
        const std::string name =
            "t" + std::to_string(n) + (below(random, 6) == 0 ? "s" + std::to_string(step) : "");
        const auto op = static_cast<OpKind>(below(random, 4) == 0 ? below(random, 5) : 0);
        const Signature agreed = signature_of(op, 1 + below(random, 3) * 100);
        const bool disagree = ranks > 1 && below(random, 10) == 0;
        ++(disagree ? errors_expected : runs_expected)[name];
        const int odd_one = below(random, ranks);
        for (int rank = 0; rank < ranks; ++rank) {
          Signature own = agreed;
          if (disagree && rank == odd_one) own.dtype = DType::kInt64;
          programs[static_cast<std::size_t>(rank)].steps.back().emplace_back(name, own);
        }
      }
      for (auto& program : programs)
        std::shuffle(program.steps.back().begin(), program.steps.back().end(), random);
    }

    // A rank submits an operation of the next step only when its own of the same name is decided.
    std::vector<std::vector<std::pair<std::string, Signature>>> left(
        static_cast<std::size_t>(ranks));
    for (int rank = 0; rank < ranks; ++rank) {
      for (auto& step : programs[static_cast<std::size_t>(rank)].steps) {
        auto& queue = left[static_cast<std::size_t>(rank)];
        queue.insert(queue.end(), step.begin(), step.end());
      }
    }
    std::vector<std::set<std::string>> in_flight(static_cast<std::size_t>(ranks));
    std::vector<std::size_t> seen(static_cast<std::size_t>(ranks), 0);
    for (std::uint64_t events = 0;; ++events) {
      if (events == 2'000'000) FAIL("does not end");
      const int rank = below(random, ranks);
      const auto me = static_cast<std::size_t>(rank);
      for (; seen[me] < simulation[rank].decided.size(); ++seen[me]) {
        for (const auto& name : names_of(simulation[rank].decided[seen[me]].operations)) {
          in_flight[me].erase(name);
        }
      }
      const bool submits = below(random, 3) == 0;
      if (submits && !left[me].empty() && !in_flight[me].contains(left[me].front().first)) {
        const auto [name, signature] = left[me].front();
        left[me].erase(left[me].begin());
        in_flight[me].insert(name);
        simulation.submit(rank, name, signature);
        continue;
      }
      if (simulation.happen(random)) continue;
      const bool all_submitted =
          std::all_of(left.begin(), left.end(), [](const auto& rest) { return rest.empty(); });
      if (all_submitted) break;
    }

    same_decisions_everywhere(simulation);
    std::map<std::string, int> runs;
    std::map<std::string, int> errors;
    for (const auto& decision : simulation[0].decided) {
      for (const auto& name : names_of(decision.operations)) {
        ++(decision.kind == DecisionItem::Kind::kBatch ? runs : errors)[name];
      }
      if (decision.kind == DecisionItem::Kind::kError) {
        CHECK(decision.status.code == HP_MISMATCH);
        CHECK(decision.status.message.find("float32 on rank") != std::string::npos);
        CHECK(decision.status.message.find("int64 on rank") != std::string::npos);
      }
    }
    CHECK(runs == runs_expected);
    CHECK(errors == errors_expected);
    for (int rank = 0; rank < ranks; ++rank) {
      CHECK(simulation[rank].negotiator().cached_names() <= options.cache_capacity);
    }
  }
}

TEST_CASE("after fail_all, old readiness is dropped and new operations run") {
  const std::uint64_t seed = test_seed();
  for (int round = 0; round < 200; ++round) {
    CAPTURE(seed);
    CAPTURE(round);
    Random random(seed + static_cast<std::uint64_t>(round));
    const int ranks = 2 + below(random, 15);
    SimulatedJob simulation = job_without_plans(random_hosts(random, ranks));
    // All ranks except one are ready. Some of their messages are still in flight at fail_all().
    const int silent = below(random, ranks);
    for (int rank = 0; rank < ranks; ++rank) {
      if (rank != silent) simulation.submit(rank, "stuck", signature_of(OpKind::kAllreduce, 4));
    }
    for (int i = below(random, 50); i > 0; --i) simulation.happen(random);
    simulation[0].set->fail_all({HP_DEADLOCK, "failed by the test"});
    std::vector<bool> submitted_again(static_cast<std::size_t>(ranks), false);
    for (int events = 0;; ++events) {
      REQUIRE(events < 100'000);
      const int rank = below(random, ranks);
      const auto me = static_cast<std::size_t>(rank);
      if (!submitted_again[me] && !simulation[rank].decided.empty()) {
        submitted_again[me] = true;
        simulation.submit(rank, "stuck", signature_of(OpKind::kAllgather, 8));
      }
      if (simulation.happen(random)) continue;
      if (std::find(submitted_again.begin(), submitted_again.end(), false) == submitted_again.end())
        break;
    }
    same_decisions_everywhere(simulation);
    REQUIRE(simulation[0].decided.size() == 2);
    CHECK(simulation[0].decided[0].kind == DecisionItem::Kind::kFailAll);
    CHECK(names_of(simulation[0].decided[1].operations) == std::vector<std::string>{"stuck"});
  }
}

TEST_CASE(
    "ranks that join at any moment are absent from exactly the operations they have not "
    "submitted") {
  const std::uint64_t seed = test_seed();
  for (int round = 0; round < (kSlowedDown ? 60 : 300); ++round) {
    CAPTURE(seed);
    CAPTURE(round);
    Random random(seed + static_cast<std::uint64_t>(round));
    const int ranks = 1 + below(random, 20);
    Negotiator::Options options;
    options.fusion_threshold = below(random, 2) * 1000;
    options.cache_capacity = static_cast<std::size_t>(below(random, 20));
    options.max_outstanding = 1 + below(random, 3);
    SimulatedJob simulation = job_without_plans(random_hosts(random, ranks), options);
    // In every phase, a rank submits its first operations, in its own order and with the same names
    // in every phase, and then joins. The ranks have different numbers of operations.
    constexpr int kPhases = 3;
    std::vector<std::vector<int>> counts(kPhases);
    for (auto& phase : counts) {
      for (int rank = 0; rank < ranks; ++rank) phase.push_back(below(random, 6));
    }
    struct State {
      int phase = -1;
      std::vector<int> left;  // operations to submit before this rank joins
      bool joined = true;
      std::size_t seen = 0;
    };
    std::vector<State> states(static_cast<std::size_t>(ranks));
    const auto begin_phase = [&](int rank) {
      State& state = states[static_cast<std::size_t>(rank)];
      if (++state.phase == kPhases) return;
      state.joined = false;
      const int count =
          counts[static_cast<std::size_t>(state.phase)][static_cast<std::size_t>(rank)];
      for (int i = 0; i < count; ++i) state.left.push_back(i);
      std::shuffle(state.left.begin(), state.left.end(), random);
    };
    for (int rank = 0; rank < ranks; ++rank) begin_phase(rank);
    for (std::uint64_t events = 0;; ++events) {
      if (events == 2'000'000) FAIL("does not end");
      const int rank = below(random, ranks);
      State& state = states[static_cast<std::size_t>(rank)];
      const auto& decided = simulation[rank].decided;
      for (; state.seen < decided.size(); ++state.seen) {
        if (decided[state.seen].kind == DecisionItem::Kind::kJoined) begin_phase(rank);
      }
      if (!state.joined && below(random, 3) == 0) {
        if (state.left.empty()) {
          state.joined = true;
          simulation.join(rank);
        } else {
          simulation.submit(rank, "op" + std::to_string(state.left.back()),
                            signature_of(OpKind::kAllreduce, 10));
          state.left.pop_back();
        }
        continue;
      }
      if (simulation.happen(random)) continue;
      if (std::all_of(states.begin(), states.end(),
                      [](const State& s) { return s.phase == kPhases; })) {
        break;
      }
    }
    same_decisions_everywhere(simulation);
    std::size_t phase = 0;
    std::set<std::string> run;
    for (const auto& decision : simulation[0].decided) {
      if (decision.kind == DecisionItem::Kind::kJoined) {
        const auto& data = counts[phase++];
        CHECK(run.size() == static_cast<std::size_t>(*std::max_element(data.begin(), data.end())));
        CHECK(decision.rank < ranks);
        run.clear();
        continue;
      }
      REQUIRE(decision.kind == DecisionItem::Kind::kBatch);
      for (std::size_t i = 0; i < decision.operations.size(); ++i) {
        CHECK(run.insert(decision.operations[i]->name).second);
        std::vector<int> without;
        for (int rank = 0; rank < ranks; ++rank) {
          if (counts[phase][static_cast<std::size_t>(rank)] <=
              std::stoi(decision.operations[i]->name.substr(2)))
            without.push_back(rank);
        }
        CHECK(decision.absent[i] == RankRanges(std::span<const int>(without)));
      }
    }
    CHECK(phase == kPhases);
  }
}

TEST_CASE("a join deep in the tree arrives after the readiness that it completes") {
  // Only rank 10 joins. Its path to the root is 9, 1, 0.
  SimulatedJob simulation = job_without_plans({0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9});
  REQUIRE(simulation[10].negotiator().position().parent == 9);
  REQUIRE(simulation[9].negotiator().position().parent == 1);
  Random random(test_seed());
  for (int rank = 0; rank < 10; ++rank) {
    simulation.submit(rank, "x", signature_of(OpKind::kAllreduce, 4));
  }
  simulation.join(10);
  while (simulation.happen(random)) {
  }
  REQUIRE(simulation[10].decided.size() == 1);
  CHECK(simulation[10].decided[0].absent == std::vector<RankRanges>{RankRanges{10}});
  CHECK(simulation[10].decided[0].lacks(0, 10));
}

TEST_CASE("when a rank leaves, every rank runs the same operations before the end") {
  const std::uint64_t seed = test_seed();
  for (int round = 0; round < 200; ++round) {
    CAPTURE(seed);
    CAPTURE(round);
    Random random(seed + static_cast<std::uint64_t>(round));
    const int ranks = 1 + below(random, 12);
    SimulatedJob simulation = job_without_plans(random_hosts(random, ranks));
    const int leaver = below(random, ranks);
    std::vector<int> next(static_cast<std::size_t>(ranks), 0);
    bool left = false;
    for (int events = 0;; ++events) {
      REQUIRE(events < 100'000);
      const int rank = below(random, ranks);
      int& mine = next[static_cast<std::size_t>(rank)];
      if (mine < 6 && !simulation[rank].negotiator().closed() && below(random, 3) == 0) {
        simulation.submit(rank, "op" + std::to_string(mine++), signature_of(OpKind::kAllreduce, 4));
      }
      if (!left && below(random, 40) == 0) {
        simulation[leaver].set->leave();
        left = true;
      }
      if (simulation.happen(random)) continue;
      bool all_closed = true;
      for (int r = 0; r < ranks; ++r) all_closed &= simulation[r].negotiator().closed();
      if (all_closed) break;
    }
    same_decisions_everywhere(simulation);
    CHECK(simulation[0].decided.back().kind == DecisionItem::Kind::kClose);
    CHECK(simulation[0].decided.back().status.message.find("rank " + std::to_string(leaver)) !=
          std::string::npos);
  }
}

TEST_CASE("recurring operations take one small message up and one down per rank and step") {
  constexpr int kRanks = kSlowedDown ? 16 : 64;
  constexpr int kTensors = 1000;
  std::vector<int> hosts;
  for (int rank = 0; rank < kRanks; ++rank) hosts.push_back(rank / 8);
  SimulatedJob simulation = job_without_plans(hosts);
  Random random(test_seed());
  std::uint64_t messages_before = 0;
  std::uint64_t bytes_before = 0;
  for (int step = 0; step < 3; ++step) {
    messages_before = simulation.messages();
    bytes_before = simulation.bytes();
    for (int rank = 0; rank < kRanks; ++rank) {
      for (int tensor = 0; tensor < kTensors; ++tensor) {
        simulation.submit(rank, "layer." + std::to_string(tensor) + ".weight",
                          signature_of(OpKind::kAllreduce, 16));
      }
    }
    while (simulation.happen(random)) {
    }
  }
  const std::uint64_t messages = simulation.messages() - messages_before;
  const std::uint64_t bytes = simulation.bytes() - bytes_before;
  // The readiness of 1,000 names takes 125 bytes, the order of 1,000 ids at most 3,000.
  CHECK(messages <= 3 * (kRanks - 1));
  CHECK(bytes / kRanks < 4000);
  CHECK(simulation[0].negotiator().cached_names() == kTensors);
}

TEST_CASE("generated names take no ids") {
  SimulatedJob simulation = job_without_plans({0, 0});
  Random random(test_seed());
  for (int i = 0; i < 50; ++i) {
    Signature signature = signature_of(OpKind::kAllreduce, 4);
    signature.recurring = false;
    for (int rank = 0; rank < 2; ++rank)
      simulation.submit(rank, "allreduce.noname." + std::to_string(i), signature);
    while (simulation.happen(random)) {
    }
  }
  CHECK(simulation[0].negotiator().cached_names() == 0);
}

TEST_CASE("invalid messages are rejected") {
  const Topology topology(std::vector<int>{0, 0, 0});
  const auto fresh = [&](int rank) { return Negotiator(0, topology.position(rank), {}); };
  Ready ready;
  ready.requests = {{"x", {{signature_of(OpKind::kAllreduce, 4), {}}}}};

  Negotiator root = fresh(0);
  root.receive(1, ready);
  CHECK_THROWS_AS(root.receive(1, ready), WireError);  // twice
  CHECK_THROWS_AS(root.receive(0, ready), WireError);  // the sender is not a child
  Ready unknown;
  unknown.ids = {3};
  CHECK_THROWS_AS(root.receive(1, unknown), WireError);
  Ready future;
  future.agreement = 1;
  CHECK_THROWS_AS(root.receive(2, future), WireError);

  Negotiator leaf = fresh(1);
  DecisionItem item;
  item.batch = 1;
  item.members = {{std::nullopt, "never submitted", {}, {}}};
  CHECK_THROWS_AS(leaf.receive(0, Decisions{0, {item}}), WireError);
  CHECK_THROWS_AS(leaf.receive(2, Decisions{0, {}}), WireError);  // the sender is not the parent
  leaf.submit(make_identity("x", signature_of(OpKind::kAllreduce, 4)));
  item.batch = 5;
  item.members = {{std::nullopt, "x", {}, {}}};
  CHECK_THROWS_AS(leaf.receive(0, Decisions{0, {item}}), WireError);  // a batch is missing
}

TEST_CASE("fusion respects the threshold, the kinds of operations and their order") {
  const auto ready = [](std::vector<std::pair<std::string, Signature>> list) {
    std::deque<ReadyOperation> queue;
    for (auto& [name, signature] : list) queue.push_back({name, signature, {}});
    return queue;
  };
  const auto names = [](const std::vector<ReadyOperation>& batch) {
    std::string text;
    for (const auto& operation : batch) text += operation.name;
    return text;
  };
  const Signature small = signature_of(OpKind::kAllreduce, 10);   // 40 bytes
  const Signature large = signature_of(OpKind::kAllreduce, 100);  // 400 bytes
  const Signature other = signature_of(OpKind::kAllreduce, 5, DType::kFloat64);
  const Signature gather = signature_of(OpKind::kAllgather, 1);
  auto queue =
      ready({{"a", small}, {"b", large}, {"c", other}, {"d", small}, {"e", gather}, {"f", small}});
  CHECK(names(take_next_batch(queue, 100)) == "ad");
  CHECK(names(take_next_batch(queue, 100)) == "b");
  CHECK(names(take_next_batch(queue, 100)) == "c");
  CHECK(names(take_next_batch(queue, 100)) == "e");
  CHECK(names(take_next_batch(queue, 100)) == "f");
  const Signature scatter = signature_of(OpKind::kReducescatter, 1);
  auto rows = ready({{"a", gather}, {"b", scatter}, {"c", gather}, {"d", scatter}});
  CHECK(names(take_next_batch(rows, 100)) == "ac");
  CHECK(names(take_next_batch(rows, 100)) == "b");
  Signature group = small;
  group.shapes = {{5}, {5}};
  auto groups = ready({{"a", group}, {"b", small}, {"c", group}, {"d", small}});
  auto apart = groups;
  CHECK(names(take_next_batch(groups, 1000)) == "abcd");
  for (const char* batch : {"a", "bd", "c"})
    CHECK(names(take_next_batch(apart, 1000, false)) == batch);
  auto unfused = ready({{"a", small}, {"b", small}});
  CHECK(names(take_next_batch(unfused, 0)) == "a");
}
