// Agrees, for one process set, on the operations that run next and on their order.
//
// Each rank announces once for every operation that it is ready. Readiness is gathered along a
// tree: a rank notifies its parent as soon as an operation is ready in its whole subtree. An
// operation therefore costs each rank one message up and one down, whatever the number of ranks,
// and operations that become ready together share these messages. The root compares the submitted
// signatures, fuses operations, and sends the order down. Recurring names travel as bits.
//
// A rank that has joined submits nothing more. An operation is then ready when all other ranks have
// submitted it. The ranks that have joined receive its signature, so that they can take part.
//
// When steps repeat, the order becomes a plan (plan.h) and negotiation stops: each rank joins the
// plan's batches as its own operations become ready, and no message is sent. Operations that the
// plan does not contain are negotiated beside it; when some can run, the root pauses the plan for
// them. A rank that waits for an operation that the plan delays breaks the plan. Plans that have
// ended are remembered and installed again when their operations come back. To end or pause a plan,
// the root halts all ranks, collects the last batch that each has joined, and stops the plan at the
// minimum. Batches that all ranks have joined run to completion. A later batch is withdrawn: the
// plan runs it when it is resumed, or its operations are negotiated again together with everything
// else that is ready.
//
// This class is a state machine without I/O, clocks or threads: submissions and messages go in,
// messages and decisions come out. Every rank sees the same decisions in the same order, with one
// exception: when a plan ends or pauses, some ranks may see one more batch, which is withdrawn.
// Every message carries the number of the agreement; messages of an earlier one are dropped.
//
// The parts, each with its own state: RankState (what is submitted here and in the subtree),
// ReadyCollector (what to tell the parent), PlanFollower (this rank's plans), PlanLearner,
// AppliedDecisions, TreeNode (the messages of the tree) and, on the root, Coordinator (what is
// decided next). The Negotiator passes submissions, messages and decisions to them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "controller/applied_decisions.h"
#include "controller/messages/messages.h"
#include "controller/plans/coordinator.h"
#include "controller/plans/plan_follower.h"
#include "controller/plans/plan_learner.h"
#include "controller/ready_collector.h"
#include "controller/state/rank_state.h"
#include "controller/state/tree_node.h"

namespace horoplug {

class Negotiator {
 public:
  struct Options : Coordinator::Options {
    // Identical consecutive steps after which a plan is installed; 0: never.
    int plan_after = 3;
    // For messages: what a rank does to take part again.
    std::string restart;
  };

  using Outgoing = TreeNode::Outgoing;

  using Decision = AppliedDecisions::Decision;

  Negotiator(std::uint32_t set, TreePosition position, const Options& options);
  Negotiator(const Negotiator&) = delete;
  Negotiator& operator=(const Negotiator&) = delete;

  // This rank is ready to run an operation. The name must not be pending, and the set must be open.
  // `dependency_stage` grows with every submission that follows the observation of a result (see
  // DependencyQuery).
  void submit(const IdentityPtr& operation, std::uint64_t dependency_stage = 0);
  // This rank submits nothing more until every rank has joined, which is then decided (kJoined).
  void join();
  // This rank wants to leave: the set closes for all ranks, after the operations decided by then.
  void leave() { close(position().rank); }
  // Closes the set in the same way because all its ranks remove it, or because `rank`, which need
  // not be in it, has left the job.
  void close(int rank = kSetRemoved);
  // Root only: fails every pending operation on all ranks. The set stays open.
  void fail_all(const Status& status);
  // A batch of this set is done on this rank. `plan`: as in its decision. `now`: in seconds on any
  // clock, for the tuner.
  void batch_done(std::uint32_t plan, double now = 0);

  // This rank has joined, and may submit nothing before the join ends.
  bool joined() const { return join_later_ || state_.readiness.has_joined(position().rank); }

  // See PlanFollower.
  bool has_plan() const { return plans_.installed(); }
  bool follows_plan() const { return plans_.follows(); }
  bool held_up() const { return plans_.held_up(); }
  bool waits_in_plan() const { return plans_.waits_in_plan(); }
  std::size_t submissions_wanted() const { return plans_.submissions_wanted(); }
  // Ends the plan, if there is one, on all ranks.
  void break_plan() { plans_.break_plan(); }

  // Messages of this set. They throw WireError if the message is invalid.
  //
  // Dispatches a message after its header. Returns false if its kind is not listed below.
  bool receive(int from, MessageKind kind, Reader& reader);
  void receive(int from, const Ready& ready);
  void receive(int from, const Decisions& decisions);
  void receive(int from, const Leave& leave);
  void receive(int from, const Joined& joined);
  void receive(int from, const DependencyLabels& labels);
  // kBreak, kHalt, kHalted.
  void receive(int from, MessageKind kind, const PlanNotice& notice);

  // Turns everything received since the last call into messages and, on the root, into decisions.
  void flush();

  std::vector<Outgoing> take_outgoing() { return node_.take_outgoing(); }
  void take_decisions(std::vector<Decision>& taken) { decisions_.take(taken); }
  std::vector<Decision> take_decisions() { return decisions_.take(); }
  // Whether these say that everything fails that was submitted before them.
  bool fails_all() const { return decisions_.fails_all(); }

  std::vector<Trial> take_trials() { return coordinator_.take_trials(); }

  bool is_root() const { return node_.is_root(); }
  bool closed() const { return !end_.ok(); }
  // The reason why nothing can be submitted, once the set is closed.
  const Status& end() const { return end_; }
  const TreePosition& position() const { return node_.position(); }
  std::size_t cached_names() const { return state_.names.size(); }
  // The name with this id; nullptr if the id was never assigned.
  const std::string* name_of(std::uint32_t id) const {
    const NameTable::Entry* known = state_.names.at(id);
    return known != nullptr ? &known->name : nullptr;
  }
  // Its number. It grows when a plan is installed or ends, and when all pending operations fail.
  std::uint32_t agreement() const { return agreement_; }

 private:
  // What this rank and its children announce.
  void enter(const IdentityPtr& operation);
  void pass_on(std::optional<ReadinessTable::Complete> complete);
  void note_join(int rank);
  void answer_dependency_query();

  // Root only.
  void decide();
  void decide_after_halt();
  void publish(const std::vector<DecisionItem>& items);

  // Decisions.
  void apply(const DecisionItem& item);
  void install_plan(const DecisionItem& item);
  void stop_plan(const DecisionItem& item);
  void return_to_negotiation();
  void close_set(int rank);
  void forget_negotiation();
  void forget_everything();

  const std::uint32_t set_;
  const std::string restart_;
  TreeNode node_;
  std::uint32_t agreement_ = 0;
  Status end_;  // not HP_OK: the set is closed

  RankState state_;
  ReadyCollector ready_;
  PlanFollower plans_;
  PlanLearner learner_;
  AppliedDecisions decisions_;
  bool join_later_ = false;  // join once the plan has ended

  // Root only.
  Coordinator coordinator_;
  std::optional<Status> failure_later_;  // fail everything with this status once the plan has ended
};

}  // namespace horoplug
