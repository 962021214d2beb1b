// Tests of one rank's part in plans, without a negotiator: the root's decisions are made up.
#include "controller/plans/plan_follower.h"

#include <doctest/doctest.h>

#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "harness/signatures.h"

using namespace horoplug;
using horoplug::testing::names_of;
using horoplug::testing::sum_of;

namespace {

// Rank 0 has the children 1 and 3; rank 1 has the child 2.
const TreePosition kFollowedRoot{0, -1, {1, 3}, {{1, 2}, {3}}};
const TreePosition kInner{1, 0, {2}, {{2}}};
const TreePosition kLeaf{2, 1, {}, {}};

struct Rank {
  explicit Rank(const TreePosition& position) : node(position), plans(0, node, pending) {}

  // Installs a plan of the operations a and b, each in a batch of its own, which begins with batch
  // 5.
  void install() {
    plans.remember(0, DependencyQuery(1, {{"a", sum_of(4), 1}, {"b", sum_of(4), 1}}, 0), 1);
    DecisionItem item;
    item.kind = DecisionItem::Kind::kInstallPlan;
    item.choices = {{.tuning = {}, .batches = {{0}, {1}}}};
    item.rounds = 1;
    plans.install(item, 4);
  }

  bool submit(const std::string& name) {
    const IdentityPtr operation = make_identity(name, sum_of(4));
    pending.add(operation, 1);
    return plans.submit(operation);
  }
  // Joins the next batch, which all ranks join.
  bool run_batch() {
    REQUIRE(plans.join_next());
    return plans.batch_done(plans.plan().epoch());
  }
  PlanNotice notice(std::uint64_t batch = 0) const { return {plans.plan().epoch(), batch}; }

  struct Sent {
    int to;
    MessageKind kind;
    std::uint64_t batch;
    bool operator==(const Sent&) const = default;
  };
  std::vector<Sent> sent() {
    std::vector<Sent> all;
    for (const auto& [to, message] : node.take_outgoing()) {
      Reader reader(message);
      const MessageKind kind = read_head(reader).kind;
      all.push_back({to, kind, decode<PlanNotice>(reader).batch});
    }
    return all;
  }

  TreeNode node;
  PendingOperations pending;
  PlanFollower plans;
};

}  // namespace

TEST_CASE("a rank joins the batches of a plan in order as its operations become ready") {
  Rank rank(kLeaf);
  CHECK(!rank.plans.join_next());
  CHECK(rank.plans.submissions_wanted() == 1);
  rank.install();
  CHECK(rank.submit("b"));
  CHECK(!rank.plans.join_next());
  CHECK(rank.plans.held_up());
  CHECK(rank.plans.submissions_wanted() == 1);
  CHECK(rank.submit("a"));
  CHECK(!rank.plans.held_up());
  REQUIRE(rank.plans.join_next());
  CHECK(rank.plans.plan().joined() == 5);
  CHECK(names_of(rank.plans.plan().last()) == std::vector<std::string>{"a"});
  CHECK(rank.plans.waits_in_plan());
  CHECK(rank.plans.submissions_wanted() == std::numeric_limits<std::size_t>::max());
  CHECK(!rank.plans.join_next());
  CHECK(!rank.plans.batch_done(rank.plans.plan().epoch() + 1));  // of another plan
  CHECK(rank.pending.find("a") != nullptr);
  CHECK(!rank.plans.batch_done(rank.plans.plan().epoch()));
  CHECK(rank.pending.find("a") == nullptr);
  CHECK(rank.run_batch());  // the end of a step
  CHECK(rank.pending.in_order().empty());
  CHECK(rank.sent().empty());
}

TEST_CASE("an operation that the plan lacks is negotiated; one that it cannot run breaks it") {
  Rank rank(kLeaf);
  rank.install();
  CHECK(!rank.submit("x"));
  CHECK(rank.sent().empty());
  CHECK(rank.submit("a"));
  CHECK(rank.plans.submit(make_identity("a", sum_of(4))));  // again, before the first one has run
  CHECK(rank.plans.submit(make_identity("b", sum_of(5))));
  CHECK(rank.sent() == std::vector<Rank::Sent>{{1, MessageKind::kBreak, 0}});
  CHECK(rank.plans.halt_state().end_wanted());
  CHECK(rank.plans.submissions_wanted() == 1);
}

TEST_CASE("a halted rank joins nothing more and reports the minimum of its subtree") {
  Rank rank(kInner);
  rank.install();
  CHECK(rank.submit("a"));
  CHECK(rank.submit("b"));
  rank.run_batch();
  REQUIRE(rank.plans.join_next());  // batch 6
  CHECK(!rank.plans.receive(0, MessageKind::kHalt, rank.notice()));
  CHECK(rank.sent() == std::vector<Rank::Sent>{{2, MessageKind::kHalt, 0}});
  CHECK(!rank.plans.receive(2, MessageKind::kHalted, rank.notice(5)));
  CHECK(rank.sent() == std::vector<Rank::Sent>{{0, MessageKind::kHalted, 5}});
  CHECK_THROWS_AS(rank.plans.uninstall(4), WireError);
  CHECK_THROWS_AS(rank.plans.uninstall(7), WireError);
  rank.plans.uninstall(5);
  CHECK(!rank.plans.installed());
  CHECK(!rank.plans.halt_state().asked());
  // The batch is withdrawn, so its operation is still to be run.
  CHECK(rank.pending.find("b") != nullptr);
  CHECK(rank.pending.find("a") == nullptr);
}

TEST_CASE("a batch that all ranks have joined is not withdrawn when the plan ends") {
  Rank rank(kLeaf);
  rank.install();
  CHECK(rank.submit("a"));
  REQUIRE(rank.plans.join_next());
  rank.plans.receive(1, MessageKind::kHalt, rank.notice());
  CHECK(rank.sent() == std::vector<Rank::Sent>{{1, MessageKind::kHalted, 5}});
  rank.plans.uninstall(5);
  CHECK(rank.pending.find("a") == nullptr);
}

TEST_CASE("the root halts all ranks when a rank breaks the plan, and learns when all have halted") {
  Rank rank(kFollowedRoot);
  rank.install();
  const PlanNotice current = rank.notice();
  CHECK(!rank.plans.receive(1, MessageKind::kBreak, {0, 0}));  // a plan that has ended
  CHECK(rank.sent().empty());
  CHECK(!rank.plans.receive(1, MessageKind::kBreak, current));
  const std::vector<Rank::Sent> halts{{1, MessageKind::kHalt, 0}, {3, MessageKind::kHalt, 0}};
  CHECK(rank.sent() == halts);
  CHECK(!rank.plans.receive(3, MessageKind::kBreak, current));
  CHECK(!rank.plans.receive(3, MessageKind::kHalted, rank.notice(5)));
  CHECK(rank.plans.receive(1, MessageKind::kHalted, rank.notice(4)));
  CHECK(rank.plans.halt_state().last_batch() == 4);
  CHECK(rank.plans.halt_state().end_wanted());
  CHECK(rank.sent().empty());
}

TEST_CASE("a paused plan goes on with the batch that was withdrawn, in a new epoch") {
  Rank rank(kLeaf);
  rank.install();
  const std::uint32_t epoch = rank.plans.plan().epoch();
  CHECK(rank.submit("a"));
  REQUIRE(rank.plans.join_next());
  rank.plans.receive(1, MessageKind::kHalt, rank.notice());
  rank.plans.pause(4);
  CHECK(rank.plans.paused());
  CHECK_THROWS_AS(rank.plans.pause(4), WireError);
  CHECK_THROWS_AS(rank.plans.uninstall(4), WireError);
  CHECK(!rank.plans.join_next());
  rank.plans.resume(6);  // two batches have run beside the plan
  CHECK(!rank.plans.paused());
  CHECK_THROWS_AS(rank.plans.resume(6), WireError);
  REQUIRE(rank.plans.join_next());
  CHECK(rank.plans.plan().joined() == 7);
  CHECK(names_of(rank.plans.plan().last()) == std::vector<std::string>{"a"});
  CHECK(rank.plans.plan().epoch() == epoch + 1);
  CHECK(!rank.plans.batch_done(epoch));
}

TEST_CASE("a rank that wants the end during a pause asks again when the plan is resumed") {
  Rank rank(kLeaf);
  rank.install();
  rank.plans.receive(1, MessageKind::kHalt, rank.notice());
  rank.sent();
  rank.plans.break_plan();
  CHECK(rank.sent().empty());
  rank.plans.pause(4);
  rank.plans.resume(5);
  CHECK(rank.sent() == std::vector<Rank::Sent>{{1, MessageKind::kBreak, 0}});
}

TEST_CASE("decisions and messages that do not fit the state of the plan are rejected") {
  using Kind = DecisionItem::Kind;
  Rank rank(kInner);
  CHECK(rank.plans.allows(Kind::kBatch));
  CHECK(rank.plans.allows(Kind::kClose));
  CHECK(!rank.plans.allows(Kind::kPausePlan));
  CHECK_THROWS_AS(rank.plans.install({}, 0), WireError);  // it remembers no plan
  CHECK_THROWS_AS(rank.plans.receive(0, MessageKind::kHalt, {1, 0}), WireError);
  CHECK_THROWS_AS(rank.plans.receive(2, MessageKind::kBreak, {1, 0}), WireError);
  const std::vector<StepMember> step{{"a", sum_of(4), 1}};
  CHECK_THROWS_AS(rank.plans.remember(0, DependencyQuery(1, step, 1), 1), WireError);
  CHECK_THROWS_AS(rank.plans.remember(0, DependencyQuery(1, step, 0), 2), WireError);

  rank.install();
  CHECK(!rank.plans.allows(Kind::kBatch));
  CHECK(!rank.plans.allows(Kind::kClose));
  CHECK(rank.plans.allows(Kind::kError));
  CHECK(rank.plans.allows(Kind::kPausePlan));
  CHECK_THROWS_AS(rank.plans.remember(0, DependencyQuery(1, step, 0), 1), WireError);
  CHECK_THROWS_AS(rank.plans.receive(2, MessageKind::kHalt, rank.notice()), WireError);
  CHECK_THROWS_AS(rank.plans.receive(0, MessageKind::kBreak, rank.notice()), WireError);
  CHECK_THROWS_AS(rank.plans.receive(2, MessageKind::kHalted, rank.notice()), WireError);
  CHECK_THROWS_AS(rank.plans.pause(4), WireError);  // no halt
  rank.plans.receive(0, MessageKind::kHalt, rank.notice());
  rank.plans.pause(4);
  CHECK(rank.plans.allows(Kind::kBatch));
  CHECK(rank.plans.allows(Kind::kInstallPlan));
}
