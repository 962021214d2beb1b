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
// plan's batches as its own operations become ready, and no message is sent. The root detects the
// repetition, queries which operations may share a batch (both PlanLearner), and
// installs the plan by a decision at the end of a step. Operations that the plan does not contain
// are negotiated beside it; when some can run, the root pauses the plan for them. A rank that waits
// for an operation that the plan delays breaks the plan. Plans that have ended are remembered
// (RememberedPlans) and installed again when their operations come back. To end or pause a plan,
// the root halts all ranks, collects the last batch that each has joined, and stops the plan at the
// minimum. Batches that all ranks have joined run to completion. A later batch is withdrawn: the
// plan runs it when it is resumed, or its operations are negotiated again together with everything
// else that is ready (negotiator_plans.cc).
//
// This class is a state machine without I/O, clocks or threads: submissions and messages go in,
// messages and decisions come out. Every rank sees the same decisions in the same order, with one
// exception: when a plan ends or pauses, some ranks may see one more batch, which is withdrawn.
// Every message carries an epoch; messages of an earlier epoch are dropped.
//
// The parts, each with its own state: PendingOperations (submitted here), ReadinessTable (submitted
// in the subtree), DecisionQueue (the root's batches, errors and ids), PlanLearner, Plan, PlanHalt
// and Tuner. The Negotiator sends and receives the messages between them and applies decisions.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "controller/decision_queue.h"
#include "controller/messages.h"
#include "controller/name_table.h"
#include "controller/pending_operations.h"
#include "controller/plan.h"
#include "controller/plan_halt.h"
#include "controller/plan_learner.h"
#include "controller/readiness.h"
#include "controller/remembered_plans.h"
#include "controller/topology.h"
#include "controller/tuner.h"

namespace horoplug {

class Negotiator {
 public:
  struct Options {
    std::int64_t fusion_threshold = 128 << 20;
    bool fuse_groups = true;
    std::size_t cache_capacity = 8192;
    // Limit for batches that are decided but not yet done on the root. Two keep the ranks busy;
    // more would only take tensors away from later, larger batches.
    int max_outstanding = 2;
    // Identical consecutive steps after which a plan is installed; 0: never.
    int plan_after = 3;
    // The initial settings, which also apply to all negotiated batches. The batches of a plan are
    // small enough that the first one is complete long before the last.
    Tuning tuning;
    TunerOptions tuner;
    Tuner::Placement placement;
  };

  struct Outgoing {
    int to;
    Bytes message;
  };

  struct Decision {
    DecisionItem::Kind kind;
    // kBatch, kJoined; kUninstallPlan, kPausePlan: the last batch that is not withdrawn
    std::uint64_t batch = 0;
    // kBatch, kUninstallPlan, kPausePlan: the plan's epoch; 0 if the batch was negotiated
    std::uint32_t plan = 0;
    std::vector<std::string>
        names;  // kBatch: operations in order; kError: the operation that fails
    // kBatch, indexed like `names`: ranks that have joined and contribute no data. Empty if there
    // are none.
    std::vector<RankRanges> absent;
    // kBatch: signatures of the operations that this rank has not submitted, because it has joined.
    std::map<std::string, Signature> unknown;
    Tuning tuning;  // kBatch: its settings
    int rank = 0;   // kJoined: the last rank to join
    Status status;  // kError, kFailAll, kClose
  };

  Negotiator(std::uint32_t set, TreePosition position, Options options);
  Negotiator(const Negotiator&) = delete;
  Negotiator& operator=(const Negotiator&) = delete;

  // This rank is ready to run an operation. The name must not be pending, and the set must be open.
  // `dependency_epoch` grows with every submission that follows the observation of a result (see
  // DependencyQuery).
  void submit(const std::string& name, const Signature& signature,
              std::uint64_t dependency_epoch = 0);
  // This rank submits nothing more until every rank has joined, which is then decided (kJoined).
  void join();
  // This rank wants to leave: the set closes for all ranks, after the operations decided by then.
  void leave();
  // Closes the set in the same way because all its ranks remove it.
  void close();
  // Root only: fails every pending operation on all ranks. The set stays open.
  void fail_all(const Status& status);
  // A batch of this set is done on this rank. `plan`: as in its decision. `now`: in seconds on any
  // clock, for the tuner.
  void batch_done(std::uint32_t plan, double now = 0);

  // This rank has joined, and may submit nothing before the join ends.
  bool joined() const { return join_later_ || readiness_.has_joined(position_.rank); }

  bool has_plan() const { return plan_ != nullptr; }
  // An operation is ready here, but the plan delays it because its batch or an earlier one is
  // incomplete on this rank.
  bool held_up() const { return plan_ && !halt_.asked() && plan_->held_up(); }
  // This rank has joined a batch of the plan, and other ranks may not have.
  bool waits_in_plan() const { return plan_ && !halt_.asked() && plan_->running(); }
  // Fewer submissions than this cannot change anything.
  std::size_t submissions_wanted() const;
  // Ends the plan, if there is one, on all ranks.
  void break_plan();

  // Messages of this set. They throw WireError if the message is invalid.
  //
  // Dispatches a message after its header. Returns false if its kind is not listed below.
  bool receive(int from, MessageKind kind, Reader& reader);
  void receive(int from, const Ready& ready);
  void receive(int from, const Decisions& decisions);
  void receive_leave(int from, int rank);
  void receive_join(int from, const Joined& joined);
  void receive(int from, const DependencyLabels& labels);
  // kBreak, kHalt, kHalted.
  void receive(int from, MessageKind kind, const PlanNotice& notice);

  // Turns everything received since the last call into messages and, on the root, into decisions.
  void flush();

  std::vector<Outgoing> take_outgoing() { return std::exchange(outgoing_, {}); }
  std::vector<Decision> take_decisions() { return std::exchange(decisions_, {}); }

  std::vector<Trial> take_trials() { return tuner_.take_results(); }

  bool is_root() const { return position_.is_root(); }
  bool closed() const { return !end_.ok(); }
  // The reason why nothing can be submitted, once the set is closed.
  const Status& end() const { return end_; }
  const TreePosition& position() const { return position_; }
  std::size_t cached_names() const { return table_.size(); }
  // The name with this id; nullptr if the id was never assigned.
  const std::string* name_of(std::uint32_t id) const {
    const NameTable::Entry* known = table_.at(id);
    return known != nullptr ? &known->name : nullptr;
  }
  // Grows whenever all pending operations are failed.
  std::uint32_t epoch() const { return epoch_; }

 private:
  std::size_t child_index(int from) const;
  void send_to_parent(Bytes message);
  void send_to_children(const Bytes& message);

  // An operation is complete in the subtree.
  void enter(const std::string& name, const Signature& signature);
  void pass_on(std::optional<ReadinessTable::Complete> complete);
  void pass_up(ReadinessTable::Complete complete);
  void decide(ReadinessTable::Complete complete);
  void note_join(int rank);
  void request_end(int rank);

  // Decisions.
  void flush_up();
  void flush_decisions();
  void flush_beside_plan();
  void publish(const std::vector<DecisionItem>& items);
  bool fits_plan_state(DecisionItem::Kind kind) const;
  void apply(const DecisionItem& item);
  void apply_batch(const DecisionItem& item, Decision& decision);
  void advance_batch(std::uint64_t number);
  void forget_negotiation();
  void forget_everything();

  // Plans (negotiator_plans.cc).
  bool consider_plan(std::vector<DecisionItem>& items);
  bool consider_continuation(std::vector<DecisionItem>& items);
  DecisionItem installation(std::size_t place, std::size_t skipped);
  bool plan_would_break(std::span<const StepMember> step) const;
  void answer_dependency_query();
  void install_plan(const DecisionItem& item);
  void remember_plan(const DecisionItem& item);
  void leave_plan();
  void submit_to_plan(const std::string& name, const Signature& signature);
  void join_plan();
  void halt();
  void answer_halt();
  void end_plan();
  void run_beside_plan();
  void note_end_of_plan(bool broken);
  void stop_plan(const DecisionItem& item);
  void pause_plan(const DecisionItem& item);
  void resume_plan();
  void uninstall_plan(const DecisionItem& item);

  const std::uint32_t set_;
  const TreePosition position_;
  const Options options_;
  std::uint32_t epoch_ = 0;
  Status end_;  // not HP_OK: the set is closed
  std::uint64_t last_batch_ = 0;

  NameTable table_;
  PendingOperations pending_;
  ReadinessTable readiness_;
  Ready up_;  // to be sent to the parent
  PlanLearner learner_;
  std::array<std::optional<Plan>, kRememberedPlans> plans_;  // by place
  Plan* plan_ = nullptr;                                     // the installed one
  // Of the installed plan. Unlike epoch_, it also grows when a plan is resumed.
  std::uint32_t plan_epoch_ = 0;
  bool paused_ = false;      // between kPausePlan and kResumePlan or another plan
  PlanHalt halt_;            // of plan_
  bool join_later_ = false;  // join once the plan has ended

  // Root only.
  DecisionQueue queue_;
  std::uint64_t resumed_after_ = 0;  // the last batch before the plan's last resumption
  int idle_pauses_ = 0;              // since the plan last ran a batch
  RememberedPlans remembered_;
  Tuner tuner_;
  std::optional<Status> failure_later_;  // fail everything with this status once the plan has ended

  std::vector<Outgoing> outgoing_;
  std::vector<Decision> decisions_;
};

}  // namespace horoplug
