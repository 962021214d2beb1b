// Tests of the parts of the negotiator, each without the others.
#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/wire.h"
#include "controller/applied_decisions.h"
#include "controller/plans/decision_queue.h"
#include "controller/plans/plan_halt.h"
#include "controller/plans/plan_learner.h"
#include "controller/ready_collector.h"
#include "controller/state/pending_operations.h"
#include "controller/state/readiness.h"
#include "controller/state/refusal.h"
#include "controller/state/tree_node.h"
#include "harness/cluster.h"
#include "harness/signatures.h"

using namespace horoplug;
using horoplug::testing::signature_of;
using horoplug::testing::test_seed;

namespace {

// Rank 0 with the children 1 and 3; rank 1 has the child 2.
const TreePosition kRoot{0, -1, {1, 3}, {{1, 2}, {3}}};

std::vector<std::string> names_of(const std::vector<ReadinessTable::Complete>& operations) {
  std::vector<std::string> names;
  for (const auto& operation : operations) names.push_back(operation.name);
  return names;
}

DecisionQueue::Options queue_options(std::size_t capacity = 8) {
  return {.fusion_threshold = 1 << 20,
          .fuse_groups = true,
          .cache_capacity = capacity,
          .max_outstanding = 2};
}

// Decides a batch of one operation and applies it to the table, as every rank does.
DecisionItem::Member decide(DecisionQueue& queue, NameTable& names, const std::string& name,
                            const Signature& signature) {
  queue.add({name, signature, {}});
  REQUIRE(queue.has_batch(false));
  const DecisionQueue::Batch batch = queue.take_batch(names);
  queue.batch_done();
  REQUIRE(batch.item.members.size() == 1);
  const DecisionItem::Member member = batch.item.members.front();
  if (member.id && !member.name.empty()) REQUIRE(names.set(*member.id, name, signature));
  return member;
}

// Feeds steps of the operations a, b, c until the learner proposes a query.
std::optional<PlanLearner::Query> run_steps(PlanLearner& learner, int most, int* steps) {
  for (*steps = 1; *steps <= most; ++*steps) {
    for (const char* name : {"a", "b", "c"}) {
      learner.note(*make_identity(name, signature_of()), 1);
      learner.note_batch({{name, signature_of(), {}}});
    }
    if (const auto query = learner.propose_query()) return query;
  }
  return std::nullopt;
}

}  // namespace

TEST_CASE("an operation is complete when this rank and all children have it, in any order") {
  std::mt19937_64 random(test_seed());
  for (int round = 0; round < 50; ++round) {
    ReadinessTable table(kRoot);
    std::vector<int> order{-1, 0, 1};  // -1: this rank; otherwise a child's index
    std::shuffle(order.begin(), order.end(), random);
    for (std::size_t i = 0; i < order.size(); ++i) {
      const auto complete =
          order[i] < 0 ? table.add_self("x", signature_of())
                       : table.add_child(static_cast<std::size_t>(order[i]), "x", signature_of());
      CHECK(complete.has_value() == (i + 1 == order.size()));
      if (!complete) continue;
      CHECK(complete->name == "x");
      CHECK(complete->signature == signature_of());
      CHECK(complete->variants.empty());
    }
    CHECK(!table.any([](const auto&, const auto&) { return true; }));
  }
}

TEST_CASE("incompatible signatures become variants with their ranks") {
  ReadinessTable table(kRoot);
  CHECK(!table.add_self("x", signature_of(OpKind::kAllreduce, 4)));
  const std::vector<Variant> divided{{signature_of(OpKind::kAllreduce, 4), {1}},
                                     {signature_of(OpKind::kAllreduce, 5), {2}}};
  CHECK(!table.add_child(0, "x", divided));
  const auto complete = table.add_child(1, "x", signature_of(OpKind::kAllreduce, 5));
  REQUIRE(complete);
  REQUIRE(complete->variants.size() == 2);
  CHECK(complete->variants[0].ranks == RankRanges{0, 1});
  CHECK(complete->variants[1].ranks == RankRanges{2, 3});
  const Status status = refusal("x", complete->signature, complete->variants, {});
  CHECK(status.code == HP_MISMATCH);
  CHECK(status.message.find("ranks 0, 1") != std::string::npos);
}

TEST_CASE("a child announces a name once") {
  ReadinessTable table(kRoot);
  CHECK(!table.add_child(0, "x", signature_of()));
  CHECK_THROWS_AS(table.add_child(0, "x", signature_of()), WireError);
}

TEST_CASE("a child speaks for the ranks of its subtree only") {
  ReadinessTable table(kRoot);
  const std::vector<Variant> foreign{{signature_of(), {1, 3}}};
  CHECK_THROWS_AS(table.add_child(0, "x", foreign), WireError);
}

TEST_CASE("a join completes what only the joining ranks lacked, in the order of the names") {
  ReadinessTable table(kRoot);
  for (const char* name : {"b", "a", "c"}) {
    CHECK(!table.add_self(name, signature_of()));
    CHECK(!table.add_child(0, name, signature_of()));
  }
  CHECK(!table.add_self("d", signature_of()));
  const auto complete = table.join(3);
  CHECK(names_of(complete) == std::vector<std::string>{"a", "b", "c"});
  CHECK(complete.front().variants.front().ranks == RankRanges{0, 1, 2});
  CHECK(table.absent_from({0, 1, 2}) == RankRanges{3});
  CHECK(table.any_joined());
  CHECK(table.last_joined() == 3);
  CHECK_THROWS_AS(table.join(3), std::logic_error);

  // One of two ranks of a subtree is not enough.
  CHECK(table.join(2).empty());
  CHECK(names_of(table.join(1)) == std::vector<std::string>{"d"});
  CHECK(!table.all_joined());
  CHECK(table.join(0).empty());
  CHECK(table.all_joined());
  table.end_join();
  CHECK(!table.any_joined());
}

TEST_CASE(
    "an operation is rejected if its root has joined, an administrative one if any rank has") {
  Signature broadcast = signature_of(OpKind::kBroadcast);
  broadcast.root = 2;
  CHECK(refusal("x", broadcast, {}, {}).ok());
  CHECK(refusal("x", broadcast, {}, {1}).ok());
  CHECK(refusal("x", broadcast, {}, {1, 2}).message ==
        "'x' cannot run: its root, rank 2, has joined");
  CHECK(refusal("x", signature_of(), {}, {1, 2}).ok());
  CHECK(!refusal("x", signature_of(OpKind::kAddSet), {}, {1}).ok());
}

TEST_CASE("operations that become ready behind two outstanding batches share the third") {
  DecisionQueue queue(queue_options());
  const NameTable names;
  for (std::uint64_t number : {1, 2}) {
    queue.add({"early" + std::to_string(number), signature_of(), {}});
    CHECK(queue.take_batch(names).item.batch == number);
  }
  for (int i = 0; i < 5; ++i) queue.add({"late" + std::to_string(i), signature_of(), {}});
  CHECK(!queue.has_batch(false));
  CHECK(queue.has_batch(true));
  queue.batch_done();
  REQUIRE(queue.has_batch(false));
  const DecisionQueue::Batch batch = queue.take_batch(names);
  CHECK(batch.operations.size() == 5);
  CHECK(batch.item.members.size() == 5);
  CHECK(batch.item.batch == 3);
  CHECK(!queue.has_batch(true));
  CHECK(queue.take_join(7).batch == 4);
  queue.continue_after(20);
  CHECK(queue.take_join(7).batch == 21);
}

TEST_CASE("half of the ids go to new names, the rest to names that recur") {
  DecisionQueue queue(queue_options(4));
  NameTable names;
  CHECK(decide(queue, names, "a", signature_of()).id == 0U);
  CHECK(decide(queue, names, "b", signature_of()).id == 1U);
  CHECK(!decide(queue, names, "c", signature_of()).id);
  CHECK(decide(queue, names, "c", signature_of()).id == 2U);
  // A known name travels as its id, unless its signature has changed.
  CHECK(decide(queue, names, "a", signature_of()).name.empty());
  CHECK(decide(queue, names, "a", signature_of(OpKind::kAllreduce, 9)).name == "a");
  Signature generated = signature_of();
  generated.recurring = false;
  for (int i = 0; i < 2; ++i) CHECK(!decide(queue, names, "g", generated).id);
  // All ids are in use after one more.
  for (int i = 0; i < 2; ++i) decide(queue, names, "d", signature_of());
  for (int i = 0; i < 3; ++i) CHECK(!decide(queue, names, "e", signature_of()).id);
  CHECK(names.size() == 4);
}

TEST_CASE("errors and closings are taken once, in order") {
  DecisionQueue queue(queue_options());
  queue.add_error("a", {HP_MISMATCH, "first"});
  queue.add_end(kSetRemoved);
  queue.add_error("b", {HP_LAYOUT_MISMATCH, "second"});
  const auto errors = queue.take_errors();
  REQUIRE(errors.size() == 2);
  CHECK(errors[0].name == "a");
  CHECK(errors[1].text == "second");
  CHECK(errors[1].code == HP_LAYOUT_MISMATCH);
  CHECK(queue.take_errors().empty());
  const auto ends = queue.take_ends();
  REQUIRE(ends.size() == 1);
  CHECK(ends[0].rank == kSetRemoved);
  CHECK(queue.take_ends().empty());
}

TEST_CASE("equal steps lead to a query, whose answers are learned once") {
  PlanLearner learner(3, 1);
  int steps = 0;
  const auto query = run_steps(learner, 20, &steps);
  REQUIRE(query);
  CHECK(query->operations == 3);
  learner.begin_query(query->number, query->operations);
  CHECK(!learner.query().complete());
  CHECK(!learner.take_learned());  // one child has not answered yet
  CHECK(!run_steps(learner, 5, &steps));
  CHECK_THROWS_AS(learner.add_answer(query->number + 1, {0, 0, 0}), WireError);
  CHECK_THROWS_AS(learner.add_answer(query->number, {0, 0}), WireError);

  CHECK(learner.add_answer(query->number, {0, 0, 0}));
  CHECK(learner.query().complete());
  CHECK(learner.take_learned() == query->number);
  CHECK(!learner.take_learned());
  CHECK(!run_steps(learner, 5, &steps));  // the step is known
  learner.reset();
  CHECK(!learner.add_answer(query->number, {0, 0, 0}));  // the answer is out of date
}

TEST_CASE("a loop of one operation becomes a step soon after it was part of something else") {
  // What a benchmark or a loop of metrics does: 1 recurs, among 2, at distances that differ.
  constexpr std::uint64_t kLoop = 1, kBarrier = 2;
  StepPattern pattern;
  for (const std::uint64_t first : {kLoop, std::uint64_t{3}, kBarrier}) pattern.note(first, true);
  const auto learned_within = [&](int most) {
    for (int i = 1; i <= most; ++i) {
      pattern.note(kLoop, true);
      if (pattern.repeated() > 0 && pattern.step().operations() == 1) return i;
    }
    return 0;
  };
  CHECK(learned_within(50) == 0);
  pattern.note(kBarrier, true);
  CHECK(learned_within(200) > 0);

  // Operations that are no steps are tried more and more rarely.
  std::mt19937_64 random(test_seed());
  StepPattern noise;
  int steps = 0;
  for (int i = 0; i < 20'000; ++i) {
    noise.note(4 + random() % 3, true);
    steps += noise.repeated() > 2 ? 1 : 0;
  }
  CHECK(steps < 2'000);
}

TEST_CASE("a step that is one batch is learned soon after other steps have come between") {
  // What a program does that trains two models in turn, and then one of them: each step waits for
  // all of its operations, and the ranks are ready for them at once.
  PlanLearner learner(3, 1);
  const auto run_step = [&](const std::vector<std::string>& names) {
    std::vector<ReadyOperation> batch;
    for (const std::string& name : names) {
      learner.note(*make_identity(name, signature_of()), 1);
      batch.push_back({name, signature_of(), {}});
    }
    learner.note_batch(batch);
  };
  const std::vector<std::string> one{"a", "b", "c"}, other{"d", "e"};
  for (const auto* const step : {&one, &one, &other, &other}) run_step(*step);
  std::optional<PlanLearner::Query> query;
  for (int i = 0; i < 50 && !query; ++i) {
    run_step(one);
    query = learner.propose_query();
  }
  REQUIRE(query);
  CHECK(query->operations == 3);
}

TEST_CASE("a query needs operations that every rank has submitted") {
  PlanLearner learner(3, 0);
  learner.note(*make_identity("a", signature_of()), 1);
  CHECK_THROWS_AS(learner.begin_query(1, 2), WireError);
  CHECK_THROWS_AS(learner.begin_query(1, 0), WireError);
  learner.note(*make_identity("b", signature_of()), PlanLearner::kNoDependencyStage);
  CHECK_THROWS_AS(learner.begin_query(1, 1), WireError);
  learner.note(*make_identity("c", signature_of()), 1);
  learner.begin_query(1, 1);
  CHECK(learner.query().complete());  // a leaf waits for no children
}

TEST_CASE("a plan that ends soon doubles the steps that the next one needs") {
  PlanLearner learner(3, 0);
  int first = 0, second = 0, third = 0;
  REQUIRE(run_steps(learner, 100, &first));
  learner.reset();
  learner.plan_ended(3, false);
  REQUIRE(run_steps(learner, 100, &second));
  CHECK(second == first + 3);
  learner.reset();
  learner.plan_ended(3, true);  // the plan ended because its trial was complete
  REQUIRE(run_steps(learner, 100, &third));
  CHECK(third == first);
  PlanLearner never(0, 0);
  CHECK(!run_steps(never, 100, &third));
}

TEST_CASE("a plan ends at the last batch that all ranks have joined") {
  std::mt19937_64 random(test_seed());
  for (int round = 0; round < 50; ++round) {
    std::vector<int> children{4, 7, 9};
    PlanHalt halt(children);
    CHECK(halt.ask());
    CHECK(!halt.ask());
    CHECK(!halt.halted());
    CHECK_THROWS_AS(halt.report(4, 1), WireError);  // the halt has not begun
    std::uint64_t least = 10 + random() % 2;
    halt.begin(least);
    std::shuffle(children.begin(), children.end(), random);
    for (const int child : children) {
      CHECK(!halt.complete());
      const std::uint64_t batch = 10 + random() % 2;
      least = std::min(least, batch);
      halt.report(child, batch);
      CHECK_THROWS_AS(halt.report(child, batch), WireError);
    }
    CHECK(halt.complete());
    CHECK(halt.last_batch() == least);
    halt.reset();
    CHECK(!halt.asked());
    CHECK(!halt.complete());
  }
}

TEST_CASE("pending operations are listed in the order of their submission") {
  PendingOperations pending;
  const IdentityPtr a = make_identity("a", signature_of());
  for (const char* name : {"c", "a", "b"}) pending.add(make_identity(name, signature_of()), 5);
  CHECK_THROWS_AS(pending.add(a, 5), std::logic_error);
  CHECK(pending.erase(a));
  CHECK(!pending.erase(a));
  CHECK(pending.find("a") == nullptr);
  pending.add(a, 6);
  std::string order;
  for (const auto* entry : pending.in_order()) order += entry->first->name;
  CHECK(order == "cba");
  CHECK(pending.find("a")->second.dependency_stage == 6);
}

TEST_CASE("a node of the tree knows its neighbours and keeps messages in order") {
  TreeNode node({1, 0, {2, 5}, {{2}, {5}}});
  CHECK(node.child_index(5) == 1);
  CHECK_THROWS_AS(node.child_index(0), WireError);
  CHECK_THROWS_AS(node.require_parent(2), WireError);
  node.require_parent(0);
  node.send_to_parent({std::byte{1}});
  node.send_to_children({std::byte{2}});
  std::vector<int> receivers;
  for (const auto& outgoing : node.take_outgoing()) receivers.push_back(outgoing.to);
  CHECK(receivers == std::vector{0, 2, 5});
  CHECK(node.take_outgoing().empty());
}

TEST_CASE("a known name travels to the parent as its id, unless its signature has changed") {
  NameTable names;
  REQUIRE(names.set(0, "a", signature_of()));
  REQUIRE(names.set(1, "b", signature_of()));
  ReadyCollector ready(names);
  ready.add({"b", signature_of(), {}});
  ready.add({"a", signature_of(), {}});
  ready.add({"a", signature_of(OpKind::kAllreduce, 9), {}});
  ready.add({"new", signature_of(), {}});
  ready.add(
      {"b", signature_of(), {{signature_of(), {1}}, {signature_of(OpKind::kBroadcast), {2}}}});
  const Bytes message = ready.take_message(3, 7);
  Reader reader(message);
  CHECK(read_head(reader).set == 3);
  const Ready decoded = decode<Ready>(reader);
  CHECK(decoded.agreement == 7);
  CHECK(decoded.ids == std::vector<std::uint32_t>{0, 1});
  REQUIRE(decoded.requests.size() == 3);
  CHECK(decoded.requests[0].name == "a");
  CHECK(decoded.requests[1].name == "new");
  CHECK(decoded.requests[2].variants.size() == 2);
  CHECK(ready.empty());
  ready.add({"new", signature_of(), {}});
  CHECK(!ready.empty());
  ready.clear();
  CHECK(ready.empty());
}

TEST_CASE("applied batches are numbered without gaps and take operations that are pending") {
  const TreePosition position{0, -1, {1}, {{1}}};
  RankState state(position);
  PlanLearner learner(0, 1);
  AppliedDecisions applied(0, {}, state, learner);
  DecisionItem batch;
  batch.batch = 1;
  batch.members = {{.id = 0, .name = "a", .absent = {}, .signature = {}}};
  CHECK_THROWS_AS(applied.apply_batch(batch), WireError);  // not pending
  applied.add_plan_stop(DecisionItem::Kind::kUninstallPlan, 1, 6);
  CHECK(applied.last_batch() == 6);
  state.pending.add(make_identity("a", signature_of()), 1);
  CHECK_THROWS_AS(applied.apply_batch(batch), WireError);  // not the next number
  batch.batch = 7;
  applied.apply_batch(batch);
  CHECK(state.pending.find("a") == nullptr);
  CHECK(state.names.find("a") == 0U);
  DecisionItem error;
  error.name = "a";
  CHECK_THROWS_AS(applied.apply_error(error), WireError);
  DecisionItem join;
  join.batch = 9;
  join.rank = 1;
  CHECK_THROWS_AS(applied.apply_join(join), WireError);  // this rank has not joined

  // A joined rank needs the signature of an operation that it has not submitted.
  state.readiness.join(0);
  batch.batch = 8;
  batch.members = {{.id = {}, .name = "b", .absent = {0}, .signature = signature_of()}};
  applied.apply_batch(batch);
  applied.apply_join(join);
  CHECK(!state.readiness.any_joined());
  const auto decisions = applied.take();
  REQUIRE(decisions.size() == 4);
  CHECK(decisions[0].plan == 1);
  CHECK(testing::names_of(decisions[1].operations) == std::vector<std::string>{"a"});
  CHECK(testing::names_of(decisions[2].operations) == std::vector<std::string>{"b"});
  CHECK(decisions[2].lacks(0, 0));
  CHECK(decisions[3].rank == 1);
  CHECK(applied.take().empty());
}
