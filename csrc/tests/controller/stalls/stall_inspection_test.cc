// Stall inspections of simulated jobs: the messages that they take, and what is diagnosed.
#include "controller/stalls/stall_inspection.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "controller/stalls/stall_diagnosis.h"
#include "harness/cluster.h"
#include "harness/simulated_inspection.h"
#include "harness/slowed_down.h"

using namespace horoplug;

namespace {

RankReport::Pending operation(const std::string& name, double age, bool waited = false) {
  return {.set = 0, .name = name, .age = Seconds(age), .waited = waited};
}

// A rank on which nothing runs, and which had no event for a minute.
RankReport quiet_rank(int rank, std::vector<RankReport::Pending> pending = {}) {
  RankReport report;
  report.rank = rank;
  report.quiet = Seconds(60);
  report.pending = std::move(pending);
  return report;
}

Diagnosis diagnose_job(SimulatedInspection& job, const SimulatedInspection::State& state) {
  return diagnose(job.run(state), {.members = {{0, job.ranks()}}, .stall_time = Seconds(5)});
}

InspectionQuestion question(std::uint64_t number) { return {number, Seconds(5), false, {}}; }

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("ranges of ranks are sets") {
  std::mt19937_64 random(testing::test_seed());
  for (int round = 0; round < 300; ++round) {
    std::vector<bool> a(40);
    std::vector<bool> b(40);
    RankRanges first;
    RankRanges second;
    for (int rank = 0; rank < 40; ++rank) {
      if (random() % 3 != 0) a[static_cast<std::size_t>(rank)] = true;
      if (random() % 3 == 0) b[static_cast<std::size_t>(rank)] = true;
    }
    std::vector<int> order(40);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    for (const int rank : order) {
      if (a[static_cast<std::size_t>(rank)]) first.add(rank);
      if (b[static_cast<std::size_t>(rank)]) second.add(rank);
    }
    RankRanges both = first;
    both.add(second);
    const RankRanges rest = first.without(second);
    std::size_t common = 0;
    for (int rank = 0; rank < 40; ++rank) {
      const auto at = static_cast<std::size_t>(rank);
      CHECK(first.contains(rank) == a[at]);
      CHECK(both.contains(rank) == (a[at] || b[at]));
      CHECK(rest.contains(rank) == (a[at] && !b[at]));
      common += a[at] && b[at] ? 1 : 0;
    }
    CHECK(first.overlaps(second) == (common > 0));
    CHECK(first.count() == static_cast<std::size_t>(std::count(a.begin(), a.end(), true)));
    CHECK(both.contains(first));
    CHECK(first.contains(both) == (both.count() == first.count()));
    CHECK(RankRanges(first.ranks()) == first);
  }
}

TEST_CASE("a stall names the ranks that are missing, although others have thousands pending") {
  SimulatedInspection job(200, 8);
  // All have submitted 3,000 operations, of which rank 77 lacks one.
  const auto diagnosis = diagnose_job(job, [](int rank) {
    RankReport report = quiet_rank(rank);
    for (int i = 0; i < 3000; ++i) {
      if (rank == 77 && i == 5) continue;
      report.pending.push_back(operation("layer." + std::to_string(i), 10 - i * 0.001));
    }
    return report;
  });
  REQUIRE(diagnosis.stalls.size() == 1);
  CHECK(diagnosis.stalls[0].name == "layer.5");
  CHECK(has(diagnosis.stalls[0].text, "has been waiting for rank 77 "));
  CHECK(!diagnosis.deadlock);
  CHECK(!diagnosis.possible_deadlock);
}

TEST_CASE("an operation that a rank has submitted and does not wait for is not missing there") {
  SimulatedInspection job(16, 4);
  // Rank 0 waits for 'last', which the others have submitted after many older operations.
  const auto diagnosis = diagnose_job(job, [](int rank) {
    if (rank == 0) return quiet_rank(0, {operation("last", 10, true)});
    RankReport report = quiet_rank(rank);
    for (int i = 0; i < 500; ++i) report.pending.push_back(operation(std::to_string(i), 20));
    report.pending.push_back(operation("last", 10));
    report.pending.push_back(operation("wait", 10, true));
    return report;
  });
  CHECK(!diagnosis.deadlock);
  CHECK(!diagnosis.possible_deadlock);
  for (const auto& stall : diagnosis.stalls) CHECK(stall.name != "last");
}

TEST_CASE("a deadlock is found if each rank waits for an operation of its own") {
  SimulatedInspection job(900, 8);
  const auto diagnosis = diagnose_job(job, [](int rank) {
    return quiet_rank(rank, {operation("of." + std::to_string(rank), 10, true)});
  });
  REQUIRE(diagnosis.deadlock);
  CHECK(has(*diagnosis.deadlock, "deadlock: every rank waits"));
  CHECK(has(*diagnosis.deadlock, "Rank 0 waits for 'of.0' (not submitted by ranks 1-899)"));
  CHECK(diagnosis.deadlocked_sets == std::vector<std::uint32_t>{0});
}

TEST_CASE("more operations than an inspection may name are a possible deadlock") {
  SimulatedInspection job(1500, 8);
  const auto diagnosis = diagnose_job(job, [](int rank) {
    return quiet_rank(rank, {operation("of." + std::to_string(rank), 10, true)});
  });
  CHECK(!diagnosis.deadlock);
  REQUIRE(diagnosis.possible_deadlock);
  CHECK(has(*diagnosis.possible_deadlock, "every rank waits"));
  CHECK(diagnosis.stalls.size() == Report::kMostOperations);
}

TEST_CASE("a rank that computes may help all others") {
  SimulatedInspection job(40, 8);
  const auto state = [](int rank) {
    RankReport report = quiet_rank(rank, {operation(rank % 2 == 0 ? "x" : "y", 10, true)});
    if (rank == 9) report = quiet_rank(rank);
    return report;
  };
  const auto diagnosis = diagnose_job(job, state);
  CHECK(!diagnosis.deadlock);
  CHECK(!diagnosis.possible_deadlock);
  CHECK(diagnosis.stalls.size() == 2);
}

TEST_CASE("ranks that have joined are not missing, and busy threads make a deadlock possible") {
  SimulatedInspection job(12, 4);
  const auto diagnosis = diagnose_job(job, [](int rank) {
    RankReport report = quiet_rank(rank, {operation(rank < 6 ? "x" : "y", 10, true)});
    if (rank == 3) report.busy_threads = 2;
    if (rank == 11) {
      report.pending = {operation("join", 10, true)};
      report.pending[0].join = true;
    }
    return report;
  });
  CHECK(!diagnosis.deadlock);
  REQUIRE(diagnosis.possible_deadlock);
  CHECK(has(*diagnosis.possible_deadlock, "'x' (not submitted by ranks 6-10)"));
  CHECK(has(*diagnosis.possible_deadlock, ", and has 2 threads that do not wait"));
}

TEST_CASE("a deadlock includes operations for which there is no room in its text") {
  SimulatedInspection job(2, 2);
  const auto diagnosis = diagnose_job(job, [](int rank) {
    if (rank == 1) return quiet_rank(1, {operation("of.1", 10, true)});
    RankReport report = quiet_rank(0);
    for (const char* name : {"a", "b", "c", "d", "in.h"}) {
      report.pending.push_back(operation(name, 10, true));
    }
    report.pending.back().group = "h";
    report.pending.back().members = {0, 1};
    return report;
  });
  REQUIRE(diagnosis.deadlock);
  CHECK(has(*diagnosis.deadlock, "'d' (not submitted by rank 1) …; rank 1 waits for 'of.1'"));
  CHECK(diagnosis.deadlocked_sets == std::vector<std::uint32_t>{0});
  REQUIRE(diagnosis.deadlocked_elsewhere.size() == 1);
  CHECK(diagnosis.deadlocked_elsewhere[0].first == OperationKey{0, "in.h", "h"});
  CHECK(diagnosis.deadlocked_elsewhere[0].second == 0);
}

// The largest set of ranks that wait only for each other, by trying all sets.
TEST_CASE("deadlocks across groups are those that an exhaustive search finds") {
  std::mt19937_64 random(testing::test_seed());
  const auto chance = [&](unsigned one_in) { return random() % one_in == 0; };
  int deadlocks = 0;
  for (int round = 0; round < 2000; ++round) {
    const int size = 2 + static_cast<int>(random() % 4);
    const auto everyone = static_cast<unsigned>((1 << size) - 1);
    struct Operation {
      std::string group, name;
      unsigned members, submitted = 0, waiting = 0;
    };
    std::vector<Operation> operations;
    for (const std::string group : {"", "g", "h"}) {
      const unsigned members =
          group.empty() ? everyone : (random() & everyone) | 1 | (1U << (size - 1));
      for (const std::string name : {"a", "b"}) operations.push_back({group, name, members});
    }
    std::vector<RankReport> reports;
    unsigned free = 0;  // ranks that may go on
    for (int rank = 0; rank < size; ++rank) {
      RankReport report = quiet_rank(rank);
      const unsigned self = 1U << rank;
      for (Operation& operation : operations) {
        if ((operation.members & self) == 0 || !chance(3)) continue;
        const bool waits = !chance(4);
        operation.submitted |= self;
        if (waits) operation.waiting |= self;
        RankReport::Pending pending{.name = operation.name, .age = Seconds(10), .waited = waits};
        if (!operation.group.empty()) {
          pending.group = operation.group;
          for (int member = 0; member < size; ++member) {
            if ((operation.members >> member & 1) != 0) pending.members.push_back(member);
          }
        }
        report.pending.push_back(pending);
      }
      if (chance(8)) report.quiet = Seconds(1);
      if (chance(8)) report.busy_threads = 1;
      if (report.quiet < Seconds(5) || report.busy_threads > 0) free |= self;
      reports.push_back(std::move(report));
    }
    unsigned stuck = 0;
    for (unsigned set = 1; set <= everyone; ++set) {
      unsigned waiting = 0;
      bool holds = (set & free) == 0;
      for (const Operation& operation : operations) {
        const unsigned missing = operation.members & ~operation.submitted;
        if ((operation.waiting & set) == 0) continue;
        waiting |= operation.waiting;
        holds &= missing != 0 && (missing & ~set) == 0;
      }
      if (holds && (set & ~waiting) == 0) stuck |= set;
    }
    std::set<std::string> groups;
    for (const Operation& operation : operations) {
      if ((operation.waiting & stuck) != 0) groups.insert(operation.group);
    }
    const bool is_left_to_a_group = groups.size() == 1 && !groups.contains("");
    SimulatedInspection job(size, 2);
    const Diagnosis diagnosis =
        diagnose_job(job, [&](int rank) { return reports[static_cast<std::size_t>(rank)]; });
    CAPTURE(round);
    REQUIRE(diagnosis.deadlock.has_value() == (stuck != 0 && !is_left_to_a_group));
    for (const auto& stall : diagnosis.stalls) CHECK(stall.set == 0);
    if (!diagnosis.deadlock) continue;
    ++deadlocks;
    CHECK(diagnosis.deadlocked_sets.size() == groups.count(""));
    CHECK(diagnosis.deadlocked_elsewhere.size() == groups.size() - groups.count(""));
    for (const auto& [operation, rank] : diagnosis.deadlocked_elsewhere) {
      CHECK((stuck >> rank & 1) != 0);
      const auto waits =
          std::count_if(operations.begin(), operations.end(),
                        [&](const auto& other) { return (other.waiting >> rank & 1) != 0; });
      const bool is_cut = waits > 4;  // the text lists at most four operations of a rank
      const std::string name = "'" + operation.name + "' in group " + operation.group;
      CHECK(has(*diagnosis.deadlock, is_cut ? " …" : name));
    }
  }
  CHECK(deadlocks > 50);
}

TEST_CASE("no message of an inspection grows with the number of pending operations") {
  const auto largest = [](int ranks, int operations) {
    SimulatedInspection job(ranks, 8);
    job.run([&](int rank) {
      RankReport report = quiet_rank(rank);
      for (int i = 0; i < operations; ++i) {
        report.pending.push_back(operation("layer." + std::to_string(i), 10 - i * 0.0001, i == 0));
      }
      return report;
    });
    return job.largest();
  };
  CHECK(largest(100, 5000) <= largest(100, 50));
  // Ranks that do the same are one range, whose numbers have more digits.
  CHECK(largest(testing::kSlowedDown ? 1000 : 3000, 50) < largest(100, 50) + 200);
}

TEST_CASE("the answer of a rank outside the subtree, or about another operation, is refused") {
  const Topology topology(std::vector<int>{0, 0, 0});
  StallInspection root(topology.position(0));
  root.begin(Seconds(5));
  root.answer(quiet_rank(0, {operation("x", 10, true)}));
  Report report = answer_of(quiet_rank(2), question(1));
  CHECK_THROWS_AS(root.receive(1, report), WireError);
  report = answer_of(quiet_rank(1), question(1));
  report.ranks = 2;
  CHECK_THROWS_AS(root.receive(1, report), WireError);
  for (const int rank : {1, 2}) root.receive(rank, answer_of(quiet_rank(rank), question(1)));
  root.answer(quiet_rank(0, {operation("x", 10, true)}));
  report = answer_of(quiet_rank(1, {operation("y", 1)}), question(2));
  CHECK_THROWS_AS(root.receive(1, report), WireError);
  CHECK(root.unanswered() == std::vector<int>{1, 2});
}
