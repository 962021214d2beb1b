// Tests of plans under the random scheduler of a simulated job.
#include "controller/plans/plan.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <set>

#include "harness/cluster.h"
#include "harness/simulated_job.h"

using namespace horoplug;
using namespace horoplug::testing;

namespace {

// Runs the job to its end. A deadline expires when no other event is possible and, unless
// `expiry_chance` is 0, at random: once in `expiry_chance` events on average.
void finish(SimulatedJob& job, Random& random, int expiry_chance) {
  for (std::uint64_t events = 0; !job.finished(); ++events) {
    REQUIRE(events < 2'000'000);
    if (expiry_chance > 0 && chance(random, expiry_chance)) job.expire_deadline(random);
    if (job.happen(random)) continue;
    if (job.finished()) break;
    const bool has_expired = job.expire_deadline(random);
    REQUIRE(has_expired);  // otherwise the job waits forever
  }
}

}  // namespace

TEST_CASE("random programs end, and all ranks execute the same batches in the same order") {
  const std::uint64_t seed = test_seed();
  std::uint64_t planned = 0;
  std::uint64_t withdrawn = 0;
  std::set<std::int64_t> settings;
  for (std::uint64_t round = 0; round < (kSlowedDown ? 50 : 1500); ++round) {
    CAPTURE(seed);
    CAPTURE(round);
    Random random(seed + round);
    const int ranks = 2 + below(random, chance(random, 4) ? 14 : 4);
    Negotiator::Options options;
    options.plan_after = 2 + below(random, 3);
    options.max_outstanding = 1 + below(random, 3);
    options.tuning.bucket_bytes = 40 * (1 + below(random, 4));
    // Half of the jobs tune their batches and chunks while they run.
    options.placement = {.ranks = ranks, .one_host = false, .lanes = 2};
    options.tuner = {.mode = chance(random, 2) ? Autotune::kAll : Autotune::kOff,
                     .warmup = 1,
                     .turns = 1 + below(random, 2),
                     .choices = 100,
                     .buckets = {40, 80, 200}};
    SimulatedJob job(random_hosts(random, ranks), options,
                     random_programs(random, ranks, 5 + below(random, 30)));
    finish(job, random, chance(random, 2) ? 20 + below(random, 500) : 0);
    for (int rank = 0; rank < ranks; ++rank) {
      // Messages that are still in flight when the programs have ended do not matter.
      REQUIRE(job[rank].done == job[0].done);
      withdrawn += job[rank].withdrawn;
    }
    std::map<std::string, int> runs;
    for (const auto& batch : job[0].done) {
      planned += batch.plan != 0;
      settings.insert(batch.tuning.bucket_bytes);
      for (const auto& name : batch.names) ++runs[name];
    }
    // The rank with the most data has submitted everything that ran.
    std::map<std::string, int> submitted;
    for (int rank = 0; rank < ranks; ++rank) {
      std::map<std::string, int> own;
      for (const Action& action : job[rank].program)
        own[action.name] += action.kind != Action::Kind::kWait;
      for (const auto& [name, count] : own) submitted[name] = std::max(submitted[name], count);
    }
    REQUIRE(runs == submitted);
  }
  MESSAGE("planned batches: " << planned << ", withdrawn: " << withdrawn);
  CHECK(planned > (kSlowedDown ? 300 : 1000));
  CHECK(withdrawn > 10);
  if (!kSlowedDown) CHECK(settings.contains(200));  // at least one of the jobs has tried it
}

TEST_CASE("a step of an installed plan sends no message") {
  const std::uint64_t seed = test_seed();
  Random random(seed);
  std::vector<std::string> names;
  for (int i = 0; i < 50; ++i) names.push_back("grad" + std::to_string(i));
  const auto step = [&](Program& program) { submit_all_then_wait(program, names); };
  SimulatedJob job({0, 0, 1, 1, 2}, {}, std::vector<Program>(5, repeat(60, step)));
  const auto in_plan = [&] {
    for (int rank = 0; rank < job.size(); ++rank) {
      if (job[rank].done.empty() || job[rank].done.back().plan == 0) return false;
    }
    return true;
  };
  while (!in_plan()) REQUIRE(job.happen(random));
  const auto steps = std::count_if(job[0].done.begin(), job[0].done.end(), [](const auto& batch) {
    return std::find(batch.names.begin(), batch.names.end(), "grad7") != batch.names.end();
  });
  CHECK(steps <= 6);
  const std::uint64_t messages = job.messages();
  finish(job, random, 0);
  CHECK(job.messages() == messages);
  CHECK(job[0].done.back().plan == 1);
  CHECK(job[0].done.back().names.size() == 50);
}

TEST_CASE(
    "operations that wait for each other never share a batch, and those that do not always do") {
  Random random(test_seed());
  const auto step = [&](Program& program) {
    submit_all_then_wait(program, {"a", "b"});
    submit_all_then_wait(program, {"c"});
    submit_all_then_wait(program, {"d", "e"});
  };
  SimulatedJob job({0, 0, 0}, {}, std::vector<Program>(3, repeat(30, step)));
  finish(job, random, 0);
  const auto& done = job[0].done;
  REQUIRE(done.size() > 3);
  std::vector<std::vector<std::string>> last;
  for (auto batch = done.end() - 3; batch != done.end(); ++batch) {
    CHECK(batch->plan == 1);
    last.push_back(batch->names);
    std::sort(last.back().begin(), last.back().end());
  }
  CHECK(last == std::vector<std::vector<std::string>>{{"a", "b"}, {"c"}, {"d", "e"}});
}

TEST_CASE("a name can occur several times in a step, and operations may be unnamed") {
  const std::uint64_t seed = test_seed();
  for (std::uint64_t round = 0; round < (kSlowedDown ? 20 : 100); ++round) {
    CAPTURE(seed);
    CAPTURE(round);
    Random random(seed + round);
    int number = 0;
    const bool has_names = chance(random, 2);
    const auto step = [&](Program& program) {
      const auto one = [&](std::int64_t elements) {
        Action action{Action::Kind::kSubmit, "loss", sum_of(elements)};
        if (!has_names) {
          action.name = "allreduce.noname." + std::to_string(++number);
          action.signature.recurring = false;
        }
        program.push_back(action);
        program.push_back({Action::Kind::kWait, action.name});
      };
      one(4);
      submit_all_then_wait(program, {"g1", "g2", "g3"});
      one(5);
      one(4);
    };
    SimulatedJob job({0, 1, 1}, {}, std::vector<Program>(3, repeat(40, step)));
    finish(job, random, 0);
    CHECK(job[0].done.back().plan == 1);
    CHECK(job[0].done[job[0].done.size() - 100].plan == 1);
    CHECK(job[1].done == job[0].done);
  }
}

TEST_CASE("a plan that keeps breaking is installed again after ever more equal steps") {
  Random random(test_seed());
  const auto phase = [&](Program& program) {
    for (int i = 0; i < 6; ++i) submit_all_then_wait(program, {"x", "y"});
    submit_all_then_wait(program, {"x"});
  };
  const Program program = repeat(100, phase);
  SimulatedJob job({0, 1}, {}, std::vector<Program>(2, program));
  finish(job, random, 0);
  std::set<std::uint32_t> plans;
  for (const auto& batch : job[0].done) plans.insert(batch.plan);
  plans.erase(0);
  CHECK(plans.size() >= 1);
  // Each of the plans after 3 and 6 equal steps breaks twice; there are never 12 of them.
  CHECK(plans.size() <= 4);
}

TEST_CASE("operations that are not in the plan run without ending it") {
  const std::uint64_t seed = test_seed();
  for (std::uint64_t round = 0; round < (kSlowedDown ? 5 : 30); ++round) {
    CAPTURE(seed);
    CAPTURE(round);
    Random random(seed + round);
    const int ranks = 2 + below(random, 5);
    int number = 0;
    const auto phase = [&](Program& program) {
      for (int i = 0; i < 10; ++i) submit_all_then_wait(program, {"x", "y", "z"});
      submit_all_then_wait(program, {"metric" + std::to_string(number++), "other metric"});
    };
    const Program program = repeat(20, phase);
    Negotiator::Options options;
    options.tuning.bucket_bytes = 20;  // one operation in each batch
    SimulatedJob job(random_hosts(random, ranks), options,
                     std::vector<Program>(static_cast<std::size_t>(ranks), program));
    finish(job, random, 0);
    // One plan was installed, and nothing else has changed the agreement.
    for (int rank = 0; rank < ranks; ++rank) {
      REQUIRE(job[rank].done == job[0].done);
      CHECK(job[rank].negotiator().agreement() == 1);
      CHECK(job[rank].negotiator().has_plan());
    }
    const auto negotiated =
        std::count_if(job[0].done.begin(), job[0].done.end(), [](const auto& batch) {
          const bool in_step = batch.names.front().size() == 1;
          return in_step && batch.plan == 0;
        });
    CHECK(negotiated < 40);  // the steps before the plan
  }
}

TEST_CASE("a rank that joins while the plan is paused ends the plan without a time limit") {
  const std::uint64_t seed = test_seed();
  for (std::uint64_t round = 0; round < (kSlowedDown ? 50 : 300); ++round) {
    CAPTURE(seed);
    CAPTURE(round);
    Random random(seed + round);
    const auto step = [](Program& program) { submit_all_then_wait(program, {"x", "y"}); };
    std::vector<Program> programs(3, repeat(10, step));
    const Program more = repeat(20, step);
    for (std::size_t rank = 0; rank < programs.size(); ++rank) {
      Program& program = programs[rank];
      program.push_back({Action::Kind::kSubmit, "metric", sum_of(4)});
      if (rank != 2) program.insert(program.end(), more.begin(), more.end());
      program.push_back({Action::Kind::kJoin, kJoinName});
      program.push_back({Action::Kind::kWait, "metric"});
      program.push_back({Action::Kind::kWait, kJoinName});
    }
    SimulatedJob job({0, 0, 1}, {}, std::move(programs));
    while (!job.finished()) REQUIRE(job.happen(random));
    for (int rank = 0; rank < job.size(); ++rank) CHECK(!job[rank].negotiator().has_plan());
  }
}

TEST_CASE("a withdrawn batch of a plan is joined again, whatever choices the plan has") {
  const std::uint64_t seed = test_seed();
  for (std::uint64_t round = 0; round < (kSlowedDown ? 40 : 200); ++round) {
    CAPTURE(seed);
    CAPTURE(round);
    Random random(seed + round);
    std::vector<StepMember> step;
    for (const char* name : {"a", "b", "c"}) step.push_back({name, sum_of(4), 1});
    const std::vector<PlanChoice> choices{
        {{}, {{0, 1, 2}}}, {{}, {{0}, {1}, {2}}}, {{}, {{0, 1}, {2}}}};
    Plan plan(step);
    plan.set_choices(choices, 5);
    Plan undisturbed = plan;
    plan.begin(1, 0);
    undisturbed.begin(1, 0);
    std::uint32_t epoch = 1;
    for (int steps = 0; steps < 25; ++steps) {
      for (const StepMember& member : step) {
        const IdentityPtr operation = make_identity(member.key, member.signature);
        REQUIRE(plan.ready(operation) == Plan::Place::kFound);
        REQUIRE(undisturbed.ready(operation) == Plan::Place::kFound);
      }
      while (undisturbed.join_next()) {
        undisturbed.batch_done();
        const std::uint64_t before = plan.joined();
        REQUIRE(plan.join_next());
        while (chance(random, 2)) {
          REQUIRE(plan.withdraw());
          CHECK(plan.joined() == before);
          plan.resume(++epoch, before);
          REQUIRE(plan.join_next());
        }
        CHECK(names_of(plan.last()) == names_of(undisturbed.last()));
        CHECK(plan.last_choice() == undisturbed.last_choice());
        CHECK(plan.joined() == undisturbed.joined());
        CHECK(plan.running_epoch() == epoch);
        plan.batch_done();
      }
      CHECK(plan.steps_joined() == undisturbed.steps_joined());
    }
  }
}

TEST_CASE("a loop of operations that are not in the plan gets a plan of its own") {
  const std::uint64_t seed = test_seed();
  CAPTURE(seed);
  Random random(seed);
  Program program = repeat(20, [](Program& p) { submit_all_then_wait(p, {"x", "y"}); });
  const Program evaluation =
      repeat(60, [](Program& p) { submit_all_then_wait(p, {"loss", "accuracy"}); });
  program.insert(program.end(), evaluation.begin(), evaluation.end());
  SimulatedJob job({0, 0, 1}, {}, std::vector<Program>(3, program));
  finish(job, random, 0);
  CHECK(job[0].done.back().plan != 0);
  CHECK(job[0].done.back().names.front() != "y");
}

namespace {

// A part of a program: a number of equal steps.
struct Phase {
  int steps;
  std::vector<std::vector<std::string>> stages;  // each is submitted at once, then waited for
};

void append(Program& program, const Phase& phase) {
  for (int i = 0; i < phase.steps; ++i) {
    for (const auto& stage : phase.stages) submit_all_then_wait(program, stage);
  }
}

}  // namespace

TEST_CASE("loops in turn keep their plans and switch without a deadline") {
  const std::vector<std::pair<Phase, Phase>> loops{
      {{10, {{"a", "b", "c"}}}, {6, {{"d", "e"}}}},            // nothing in common
      {{10, {{"x", "a", "b"}}}, {6, {{"x", "d", "e"}}}},       // some operations in common
      {{10, {{"a", "b", "x"}}}, {10, {{"a", "b", "y"}}}},      // one operation differs
      {{10, {{"a", "b"}, {"x"}}}, {10, {{"a", "b"}, {"y"}}}},  // after a common batch
      {{10, {{"a"}, {"b"}}}, {6, {{"d"}, {"e"}, {"f"}}}},      // operations that wait for others
      {{1, {{"a", "b"}}}, {1, {{"d"}}}},                       // in turn
      {{1, {{"a", "b", "x"}}}, {1, {{"a", "b", "y"}}}},        // the same, with common operations
  };
  const std::uint64_t seed = test_seed();
  for (std::uint64_t round = 0; round < (kSlowedDown ? 4 : 20); ++round) {
    for (std::size_t kind = 0; kind < loops.size(); ++kind) {
      CAPTURE(seed);
      CAPTURE(round);
      CAPTURE(kind);
      Random random(seed + round);
      const int ranks = 2 + below(random, 4);
      const auto& [training, evaluation] = loops[kind];
      const int warm_up = 60 / training.steps;
      Program program;
      for (int i = 0; i < warm_up; ++i) {
        append(program, training);
        append(program, evaluation);
      }
      const std::size_t learned = program.size();
      for (int i = 0; i < warm_up; ++i) {
        append(program, training);
        append(program, evaluation);
      }
      SimulatedJob job(random_hosts(random, ranks), {},
                       std::vector<Program>(static_cast<std::size_t>(ranks), program));
      const auto is_learned = [&] { return job[0].at >= learned; };
      while (!is_learned()) {
        if (!job.happen(random)) REQUIRE(job.expire_deadline(random));
      }
      const std::size_t before = job[0].done.size();
      while (!job.finished()) REQUIRE(job.happen(random));
      const auto negotiated =
          std::count_if(job[0].done.begin() + static_cast<std::ptrdiff_t>(before),
                        job[0].done.end(), [](const auto& batch) { return batch.plan == 0; });
      CHECK(negotiated == 0);
      for (int rank = 0; rank < ranks; ++rank) REQUIRE(job[rank].done == job[0].done);
    }
  }
}

TEST_CASE("programs that change between loops at random end, and all ranks do the same") {
  const std::uint64_t seed = test_seed();
  std::uint64_t planned = 0;
  std::uint64_t negotiated = 0;
  for (std::uint64_t round = 0; round < (kSlowedDown ? 20 : 600); ++round) {
    CAPTURE(seed);
    CAPTURE(round);
    Random random(seed + round);
    const int ranks = 2 + below(random, chance(random, 4) ? 10 : 3);
    // More loops than plans that are remembered, of operations that may be common.
    std::vector<Phase> loops(static_cast<std::size_t>(2 + below(random, 5)));
    const int names = 4 + below(random, 12);
    for (Phase& loop : loops) {
      std::set<int> used;
      loop.stages.resize(1 + static_cast<std::size_t>(below(random, 3)));
      for (auto& stage : loop.stages) {
        for (int i = 1 + below(random, 3); i > 0; --i) {
          const int name = below(random, names);
          if (used.insert(name).second) stage.push_back("t" + std::to_string(name));
        }
      }
    }
    const int disorder = 5 + below(random, 60);
    const bool joins = chance(random, 3);
    std::vector<Program> programs(static_cast<std::size_t>(ranks));
    for (int i = 0; i < 25; ++i) {
      Phase& loop = loops[static_cast<std::size_t>(below(random, static_cast<int>(loops.size())))];
      loop.steps = chance(random, 3) ? 1 : 1 + below(random, 12);
      const bool has_metric = chance(random, 3);
      for (Program& program : programs) {
        for (int step = 0; step < loop.steps; ++step) {
          for (std::vector<std::string> stage : loop.stages) {
            if (chance(random, disorder)) std::shuffle(stage.begin(), stage.end(), random);
            submit_all_then_wait(program, stage);
          }
        }
        if (has_metric) submit_all_then_wait(program, {"metric"});
      }
    }
    for (Program& program : programs) {
      if (!joins) break;
      program.push_back({Action::Kind::kJoin, kJoinName});
      program.push_back({Action::Kind::kWait, kJoinName});
    }
    Negotiator::Options options;
    options.plan_after = 2 + below(random, 2);
    options.tuning.bucket_bytes = 16 * (1 + below(random, 3));
    options.placement = {.ranks = ranks, .one_host = false, .lanes = 2};
    options.tuner = {.mode = chance(random, 2) ? Autotune::kAll : Autotune::kOff,
                     .warmup = 1,
                     .turns = 1,
                     .choices = 100,
                     .buckets = {16, 32, 64}};
    SimulatedJob job(random_hosts(random, ranks), options, std::move(programs));
    finish(job, random, chance(random, 2) ? 20 + below(random, 500) : 0);
    std::map<std::string, int> runs;
    std::map<std::string, int> submitted;
    for (const Action& action : job[0].program) {
      submitted[action.name] += action.kind != Action::Kind::kWait;
    }
    for (const auto& batch : job[0].done) {
      ++(batch.plan != 0 ? planned : negotiated);
      for (const auto& name : batch.names) ++runs[name];
    }
    REQUIRE(runs == submitted);
    for (int rank = 0; rank < ranks; ++rank) REQUIRE(job[rank].done == job[0].done);
  }
  MESSAGE("planned batches: " << planned << ", negotiated: " << negotiated);
  CHECK(planned > (kSlowedDown ? 1'000 : 10'000));
}

TEST_CASE("failures and closings during a plan end the same operations on all ranks") {
  const std::uint64_t seed = test_seed();
  for (std::uint64_t round = 0; round < (kSlowedDown ? 40 : 200); ++round) {
    CAPTURE(seed);
    CAPTURE(round);
    Random random(seed + round);
    const int ranks = 2 + below(random, 5);
    const auto step = [&](Program& program) { submit_all_then_wait(program, {"a", "b"}); };
    SimulatedJob job(random_hosts(random, ranks), {},
                     std::vector<Program>(static_cast<std::size_t>(ranks), repeat(200, step)));
    const int when = below(random, 3000);
    for (int i = 0; i < when; ++i) job.happen(random);
    const bool leaves = chance(random, 2);
    if (leaves) {
      job[below(random, ranks)].set->leave();
    } else {
      job[0].set->fail_all({HP_DEADLOCK, "failed by the test"});
    }
    // A rank whose operation has failed continues with its next step; no rank waits forever.
    const auto over = [&] {
      for (int rank = 0; rank < ranks; ++rank) {
        if (leaves ? !job[rank].negotiator().closed() : !job[rank].finished()) return false;
      }
      return true;
    };
    for (int events = 0; leaves && !over(); ++events) {
      REQUIRE(events < 1'000'000);
      for (int rank = 0; rank < ranks; ++rank) {
        if (job[rank].negotiator().closed()) job[rank].at = job[rank].program.size();
      }
      if (!job.happen(random)) job.expire_deadline(random);
    }
    if (leaves) {
      for (int rank = 0; rank < ranks; ++rank) {
        while (job.happen(random)) {
        }
        CHECK(job[rank].done == job[0].done);
      }
    }
  }
}

TEST_CASE("fail_all is safe at every moment, including the one at which a plan is due") {
  const auto step = [&](Program& program) { submit_all_then_wait(program, {"a"}); };
  const std::vector<Program> programs(3, repeat(10, step));
  const std::uint64_t seed = test_seed();
  CAPTURE(seed);
  bool was_in_plan = false;
  for (int when = 0; !was_in_plan; ++when) {
    CAPTURE(when);
    REQUIRE(when < 10'000);
    Random random(seed);
    SimulatedJob job({0, 0, 0}, {}, programs);
    for (int i = 0; i < when; ++i) REQUIRE(job.happen(random));
    was_in_plan = !job[0].done.empty() && job[0].done.back().plan != 0;
    job[0].set->fail_all({HP_DEADLOCK, "failed by the test"});
    for (int rank = 0; rank < 3; ++rank) job[rank].at = job[rank].program.size();
    while (job.happen(random)) {
    }
    for (int rank = 0; rank < 3; ++rank) {
      CHECK(job[rank].negotiator().agreement() == job[0].negotiator().agreement());
      CHECK(!job[rank].negotiator().has_plan());
    }
  }
}

TEST_CASE("invalid messages about plans are rejected") {
  const Topology topology(std::vector<int>{0, 0, 0});
  const auto fresh = [&](int rank) { return Negotiator(0, topology.position(rank), {}); };
  const auto decide = [](Negotiator& negotiator, const DecisionItem& item,
                         std::uint32_t agreement = 0) {
    negotiator.receive(0, Decisions{agreement, {item}});
  };
  DecisionItem remember;
  remember.kind = DecisionItem::Kind::kRememberPlan;
  DecisionItem install;
  install.kind = DecisionItem::Kind::kInstallPlan;
  install.choices = {{{}, {{0}}}};
  DecisionItem query;
  query.kind = DecisionItem::Kind::kDependencyQuery;
  remember.batch = query.batch = 1;
  query.operations = 1;
  DecisionItem uninstall;
  uninstall.kind = DecisionItem::Kind::kUninstallPlan;

  Negotiator leaf = fresh(1);
  CHECK_THROWS_AS(decide(leaf, remember), WireError);  // without a query
  CHECK_THROWS_AS(decide(leaf, install), WireError);   // nothing is remembered
  CHECK_THROWS_AS(decide(leaf, query), WireError);     // no operation has run
  Negotiator free = fresh(1);
  CHECK_THROWS_AS(decide(free, uninstall), WireError);  // no plan is installed
  CHECK_THROWS_AS(free.receive(0, MessageKind::kHalt, {0, 0}), WireError);
  CHECK_THROWS_AS(free.receive(2, MessageKind::kHalt, {0, 0}), WireError);  // not from the parent
  Negotiator root = fresh(0);
  CHECK_THROWS_AS(root.receive(1, MessageKind::kBreak, {1, 0}), WireError);
  CHECK_THROWS_AS(root.receive(1, MessageKind::kHalted, {0, 0}), WireError);
  CHECK_THROWS_AS(root.receive(0, DependencyLabels{0, {}}), WireError);  // not from a child
  CHECK_THROWS_AS(root.receive(1, DependencyLabels{1, {}}), WireError);  // without a query

  Negotiator twice = fresh(1);
  twice.submit(make_identity("x", sum_of(4)));
  DecisionItem batch;
  batch.batch = 1;
  batch.members = {{0, "x", {}, {}}};
  decide(twice, batch);
  decide(twice, query);
  remember.batch = 2;
  CHECK_THROWS_AS(decide(twice, remember), WireError);  // the number of another query
  remember.batch = 1;
  for (const PlanContents& wrong : {PlanContents{{0}, {0}}, PlanContents{{1}}}) {
    Negotiator one = fresh(1);
    one.submit(make_identity("x", sum_of(4)));
    decide(one, batch);
    decide(one, query);
    decide(one, remember);
    install.choices = {{{}, wrong}};
    CHECK_THROWS_AS(decide(one, install), WireError);
  }
  Negotiator planned = fresh(1);
  planned.submit(make_identity("x", sum_of(4)));
  decide(planned, batch);
  decide(planned, query);
  decide(planned, remember);
  DecisionItem impossible = install;
  impossible.choices.clear();
  CHECK_THROWS_AS(decide(planned, impossible), WireError);  // never installed with choices
  install.choices = {{{}, {{0}}}};
  decide(planned, install);
  CHECK(planned.has_plan());
  CHECK_THROWS_AS(decide(planned, batch, 1), WireError);      // a batch while the plan is installed
  CHECK_THROWS_AS(decide(planned, uninstall, 1), WireError);  // the plan was not halted
  planned.receive(0, MessageKind::kHalt, {1, 0});
  CHECK_THROWS_AS(planned.receive(0, MessageKind::kHalt, {1, 0}), WireError);  // twice
  uninstall.batch = 7;
  CHECK_THROWS_AS(decide(planned, uninstall, 1), WireError);  // a batch that was not joined
  uninstall.batch = 1;
  decide(planned, uninstall, 1);
  CHECK(!planned.has_plan());
}
