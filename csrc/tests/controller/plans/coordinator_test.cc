// Tests of what the root decides, without a negotiator: the other ranks are made up.
#include "controller/plans/coordinator.h"

#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "controller/applied_decisions.h"
#include "harness/signatures.h"

using namespace horoplug;
using horoplug::testing::sum_of;

namespace {

using Kind = DecisionItem::Kind;
using Kinds = std::vector<Kind>;
using Names = std::vector<std::string>;

// The root of three ranks, whose children 1 and 2 do what the root does.
class Root {
 public:
  Root()
      : node({0, -1, {1, 2}, {{1}, {2}}}),
        state(node.position()),
        plans(0, node, state.pending),
        learner(3, 2),
        decisions(0, {}, state, learner),
        coordinator({}, state, plans, learner) {}

  // All ranks submit an operation. Rank 2 may submit another shape.
  void submit(const std::string& name, std::int64_t elements_on_2 = 4) {
    const IdentityPtr operation = make_identity(name, sum_of(4));
    state.pending.add(operation, 1);
    if (plans.installed() && plans.submit(operation)) return;
    CHECK(!state.readiness.add_self(name, sum_of(4)));
    CHECK(!state.readiness.add_child(0, name, sum_of(4)));
    auto complete = state.readiness.add_child(1, name, sum_of(elements_on_2));
    REQUIRE(complete);
    coordinator.add(std::move(*complete));
  }

  // Applies the decisions as a negotiator does. Batches are done at once. Returns their kinds.
  Kinds apply(const std::vector<DecisionItem>& items) {
    Kinds kinds;
    for (const DecisionItem& item : items) {
      REQUIRE(plans.allows(item.kind));
      kinds.push_back(item.kind);
      apply(item);
    }
    return kinds;
  }

  // One step of a program with negotiated operations.
  Kinds negotiate(const Names& names) {
    for (const std::string& name : names) submit(name);
    return apply(coordinator.decide());
  }
  void learn(const Names& names) {
    for (int step = 0; step < 4; ++step) negotiate(names);
    REQUIRE(plans.installed());
  }
  // One step of a program whose plan has a single batch.
  void run_step(const Names& names) {
    for (const std::string& name : names) submit(name);
    REQUIRE(plans.join_next());
    CHECK(plans.batch_done(plans.plan().epoch()));
    CHECK(!coordinator.plan_step_done(0));
  }
  // All ranks halt after the last batch that the root has joined.
  void halt() {
    plans.halt();
    const PlanNotice notice{plans.plan().epoch(), plans.plan().joined()};
    CHECK(!plans.receive(1, MessageKind::kHalted, notice));
    CHECK(plans.receive(2, MessageKind::kHalted, notice));
  }
  // Operations that the plan lacks become ready on all ranks.
  Kinds run_beside_plan(const Names& names) {
    for (const std::string& name : names) submit(name);
    CHECK(coordinator.has_batch_beside_plan());
    halt();
    return apply(coordinator.pause_plan());
  }

  TreeNode node;
  RankState state;
  PlanFollower plans;
  PlanLearner learner;
  AppliedDecisions decisions;
  Coordinator coordinator;

 private:
  void apply(const DecisionItem& item) {
    switch (item.kind) {
      case Kind::kBatch:
        decisions.apply_batch(item);
        coordinator.batch_done();
        break;
      case Kind::kError:
        decisions.apply_error(item);
        break;
      case Kind::kDependencyQuery:
        learner.begin_query(item.batch, item.operations);
        for (int child = 0; child < 2; ++child) {
          learner.add_answer(item.batch, std::vector<std::uint32_t>(item.operations, 0));
        }
        break;
      case Kind::kRememberPlan:
        plans.remember(item.place, learner.query(), item.batch);
        break;
      case Kind::kInstallPlan:
        plans.install(item, decisions.last_batch());
        coordinator.plan_installed(decisions.last_batch());
        learner.reset();
        break;
      case Kind::kPausePlan:
      case Kind::kUninstallPlan:
        decisions.add_plan_stop(item.kind, plans.plan().epoch(), item.batch);
        if (item.kind == Kind::kPausePlan) return plans.pause(item.batch);
        plans.uninstall(item.batch);
        coordinator.plan_uninstalled(item.batch);
        break;
      case Kind::kResumePlan:
        plans.resume(decisions.last_batch());
        coordinator.plan_resumed(decisions.last_batch());
        break;
      default:
        break;
    }
  }
};

}  // namespace

TEST_CASE("errors come before batches, and the end of the set after them") {
  Root root;
  root.coordinator.add_end(2);
  root.submit("a");
  root.submit("b", 5);
  root.submit("c");
  const auto items = root.coordinator.decide();
  REQUIRE(items.size() == 3);
  CHECK(items[0].kind == Kind::kError);
  CHECK(items[0].name == "b");
  CHECK(items[0].text.find("rank") != std::string::npos);
  CHECK(items[1].kind == Kind::kBatch);
  CHECK(items[1].members.size() == 2);
  CHECK(items[2].kind == Kind::kClose);
  CHECK(items[2].rank == 2);
  root.apply(items);
  CHECK(root.coordinator.decide().empty());
}

TEST_CASE("the third equal step ends with a dependency query, and the fourth with the plan") {
  Root root;
  const Names step{"a", "b"};
  CHECK(root.negotiate(step) == Kinds{Kind::kBatch});
  CHECK(root.negotiate(step) == Kinds{Kind::kBatch});
  CHECK(root.negotiate(step) == Kinds{Kind::kBatch, Kind::kDependencyQuery});
  CHECK(root.negotiate(step) == Kinds{Kind::kBatch, Kind::kRememberPlan, Kind::kInstallPlan});
  root.run_step(step);
  CHECK(root.plans.plan().joined() == 5);
}

TEST_CASE("a plan is not installed while a rank has submitted an operation that it lacks") {
  Root root;
  const Names step{"a", "b"};
  for (int i = 0; i < 3; ++i) root.negotiate(step);
  CHECK(!root.state.readiness.add_child(0, "x", sum_of(4)));
  CHECK(root.negotiate(step) == Kinds{Kind::kBatch, Kind::kRememberPlan});
  CHECK(!root.state.readiness.add_self("x", sum_of(4)));
  REQUIRE(root.state.readiness.add_child(1, "x", sum_of(4)));
  CHECK(root.negotiate(step) == Kinds{Kind::kBatch, Kind::kInstallPlan});
}

TEST_CASE("a plan is paused for an operation that it lacks, and goes on after it") {
  Root root;
  const Names step{"a", "b"};
  root.learn(step);
  root.run_step(step);
  CHECK(!root.coordinator.has_batch_beside_plan());
  CHECK(root.run_beside_plan({"metric"}) ==
        Kinds{Kind::kPausePlan, Kind::kBatch, Kind::kResumePlan});
  CHECK(root.decisions.last_batch() == 6);
  root.run_step(step);
  CHECK(root.plans.plan().joined() == 7);
  CHECK(!root.coordinator.plan_is_abandoned());
}

TEST_CASE("a plan that runs no batch between eight pauses is abandoned") {
  Root root;
  const Names step{"a", "b"};
  root.learn(step);
  for (int pause = 0; pause < 8; ++pause) {
    CHECK(!root.coordinator.plan_is_abandoned());
    root.run_beside_plan({"x" + std::to_string(pause)});
  }
  CHECK(root.coordinator.plan_is_abandoned());
  root.halt();
  CHECK(root.apply(root.coordinator.end_plan()) == Kinds{Kind::kUninstallPlan});
  // It does not count as broken: it is remembered, and installed again after one step.
  CHECK(root.negotiate(step) == Kinds{Kind::kBatch, Kind::kInstallPlan});
}

TEST_CASE("a remembered plan takes the place of the installed one at its first operation") {
  Root root;
  const Names train{"a", "b"}, evaluate{"c", "d"};
  root.learn(train);
  root.halt();
  root.apply(root.coordinator.end_plan());
  root.learn(evaluate);
  root.run_step(evaluate);
  CHECK(root.run_beside_plan({"a"}) == Kinds{Kind::kPausePlan, Kind::kInstallPlan});
  CHECK(root.plans.plan().contains("b"));
  CHECK(!root.plans.plan().contains("c"));
}
