// Agrees, for one process set, on what runs next and in which order.
//
// Each rank says once for every operation that it is ready. Readiness is gathered along a tree: a
// rank tells its parent as soon as an operation is ready in all of its subtree, so that an
// operation costs each rank one message up and one down, however many ranks there are, and
// operations that become ready together share it. The root compares what the ranks have submitted,
// fuses what fits together, and sends the order down. Names that recur travel as bits.
//
// A rank that has joined has nothing more to submit; an operation is then ready when everyone else
// has submitted it, and the ranks that have joined are told what it is, so that they can take part.
//
// When steps repeat, the order becomes a plan (plan.h) and nothing is negotiated any more: each
// rank joins the plan's batches as its own operations become ready, and no message is sent. The
// root sees that steps repeat (StepPattern), asks which operations may share a batch
// (DependencyQuery) and locks the plan with a decision, at the end of a step. Whoever meets
// something that the plan does not have, or waits for what it holds up, breaks it: the root halts
// all ranks, learns how far each has joined, and unlocks at the least of that. What was joined by
// all runs to its end; what was not is withdrawn, and is negotiated again with all else that is
// ready (locking.cc).
//
// This is a state machine: submissions and messages go in, messages and decisions come out. There
// is no I/O, no clock and no thread in it. Every rank sees the same decisions in the same order,
// except that of a plan that is broken some may see a batch more, before it is withdrawn. Every
// message carries an epoch, which tells apart and drops what belongs to an earlier agreement.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/status.h"
#include "controller/fusion.h"
#include "controller/messages.h"
#include "controller/name_table.h"
#include "controller/plan.h"
#include "controller/step_pattern.h"
#include "controller/topology.h"
#include "controller/tuner.h"

namespace horoplug {

class Negotiator {
 public:
  struct Options {
    std::int64_t fusion_threshold = 128 << 20;
    bool fuse_groups = true;
    std::size_t cache_capacity = 8192;
    // Batches that may be decided but not yet done on the root. Two keep the ranks busy; more would
    // only take tensors away from later, larger batches.
    int max_outstanding = 2;
    // Steps in a row with the same operations after which their order becomes a plan; 0: never.
    int plan_after = 3;
    // To begin with, and of everything that is negotiated. A plan's batches are small enough that
    // the first one is complete long before the last.
    Tuning tuning;
    TunerOptions tuner;
    Tuner::Job job;
  };

  struct Outgoing {
    int to;
    Bytes message;
  };

  struct Decision {
    DecisionItem::Kind kind;
    std::uint64_t batch = 0;  // kBatch, kJoined; kUninstallPlan: the last that is not withdrawn
    std::uint32_t plan = 0;   // kBatch, kUninstallPlan: the plan's epoch; 0: it was negotiated
    std::vector<std::string> names;  // kBatch: members in order; kError: the one that fails
    // kBatch, by place in names: ranks that have joined and take no part of their own. Empty if
    // there are none.
    std::vector<std::vector<int>> absent;
    // kBatch: what the members are that this rank has not submitted, because it has joined.
    std::map<std::string, Signature> unknown;
    Tuning tuning;  // kBatch: how it runs
    int rank = 0;   // kJoined: the last to join
    Status status;  // kError, kFailAll, kClose
  };

  Negotiator(std::uint32_t set, TreePosition position, Options options);

  // This rank is ready to run an operation. Its name must not be pending, and the set not closed.
  // `dependency_epoch`: grows with every submission that follows a look at a result (see
  // DependencyQuery).
  void submit(const std::string& name, const Signature& signature,
              std::uint64_t dependency_epoch = 0);
  // This rank submits nothing more until everyone has joined, which is then decided (kJoined).
  void join();
  // This rank wants to leave: the set is closed for everyone, after what has been decided by then.
  void leave();
  // The same because the set is removed, by all its ranks.
  void close();
  // Root only: every pending operation fails, on all ranks, and the set goes on.
  void fail_all(const Status& status);
  // A batch of this set is done on this rank; `plan` as in its decision. `now`: in seconds, on any
  // clock, for the tuner.
  void batch_done(std::uint32_t plan, double now = 0);

  bool has_plan() const { return plan_.has_value(); }
  // Something is ready here that the plan does not let run, since a batch before it, or its own, is
  // not complete on this rank.
  bool held_up() const { return plan_ && !breaking_ && plan_->held_up(); }
  // This rank has joined a batch of the plan that it cannot know to be joined by all.
  bool waits_in_plan() const { return plan_ && !breaking_ && plan_->running(); }
  // As long as fewer operations than this are submitted, none of them can change anything.
  std::size_t submissions_wanted() const;
  // Ends the plan, if there is one, on all ranks.
  void break_plan();

  // Messages of this set. They throw WireError if the message cannot be right.
  //
  // Any of them, after its head. False if it is none of those below.
  bool receive(int from, MessageKind kind, Reader& reader);
  void receive(int from, const Ready& ready);
  void receive(int from, const Decisions& decisions);
  void receive_leave(int from, int rank);
  void receive_join(int from, const Joined& joined);
  void receive(int from, const DependencyLabels& waves);
  // kBreak, kHalt, kHalted.
  void receive(int from, MessageKind kind, const PlanNotice& notice);

  // Turns what has come in since the last call into messages and, on the root, into decisions.
  void flush();

  std::vector<Outgoing> take_outgoing() { return std::exchange(outgoing_, {}); }
  std::vector<Decision> take_decisions() { return std::exchange(decisions_, {}); }

  std::vector<Trial> take_trials() { return tuner_.take_results(); }

  bool is_root() const { return position_.is_root(); }
  bool closed() const { return !end_.ok(); }
  // Why nothing can be submitted any more, once the set is closed.
  const Status& end() const { return end_; }
  const TreePosition& position() const { return position_; }
  std::size_t cached_names() const { return table_.size(); }
  // What a number stands for; nullptr if it was never given.
  const std::string* name_of(std::uint32_t id) const {
    const NameTable::Entry* known = table_.at(id);
    return known != nullptr ? &known->name : nullptr;
  }
  // Grows whenever everything pending is called off.
  std::uint32_t epoch() const { return epoch_; }

 private:
  // The parts of the subtree that have submitted an operation with equal signatures.
  struct VariantGroup {
    Signature signature;
    bool self = false;
    std::vector<std::size_t> children;  // whole subtrees
    std::vector<int> ranks;             // single ranks, when a subtree is divided
  };
  // Of an operation that not every rank has submitted.
  static constexpr std::uint64_t kNoDependencyEpoch = ~std::uint64_t{0};
  struct Pending {
    Signature signature;
    std::uint64_t dependency_epoch;
    std::uint64_t order;  // of submission
  };
  struct Entry {
    std::vector<VariantGroup> groups;
    std::vector<std::size_t> children_in;
    bool self_in = false;
  };

  std::size_t child_index(int from) const;
  bool everyone_joined(const std::vector<int>& ranks) const;
  bool is_full(const Entry& entry) const;
  void note_join(int rank);
  void request_end(int rank);
  void forget_everything();
  void enter(const std::string& name, const Signature& signature);

  // Plans (locking.cc).
  void note_decided(const std::vector<ReadyOperation>& batch);
  void remember(const std::string& name, const Signature& signature,
                std::uint64_t dependency_epoch);
  std::optional<DecisionItem> consider_plan();
  bool plan_would_break() const;
  void join_dependency_query(const DecisionItem& query);
  void answer_dependency_query();
  void install_plan(const DecisionItem& item);
  void join_plan();
  std::vector<const std::pair<const std::string, Pending>*> pending_in_order() const;
  void halt();
  void answer_halt();
  void uninstall_plan(const DecisionItem& item);
  VariantGroup& group_of(Entry& entry, const Signature& signature);
  void add_child(const std::string& name, std::size_t child, const Signature& signature);
  Entry& entry_for_child(const std::string& name, std::size_t child);
  void complete_if_full(const std::string& name);
  std::vector<Variant> variants_of(const Entry& entry) const;
  void pass_up(const std::string& name, const Entry& entry);
  void decide(const std::string& name, const Entry& entry);
  std::vector<int> absent_from(const std::vector<int>& submitted) const;
  std::string objection_to(const Signature& signature, const std::vector<int>& absent) const;
  void refuse(const std::string& name, const std::string& text);
  DecisionItem make_batch(const std::vector<ReadyOperation>& batch);
  void publish(const std::vector<DecisionItem>& items);
  void apply(const DecisionItem& item);

  const std::uint32_t set_;
  const TreePosition position_;
  const Options options_;
  std::uint32_t epoch_ = 0;
  Status end_;  // not HP_OK: the set is closed

  NameTable table_;
  std::unordered_map<std::string, Pending> pending_;  // submitted here and not decided
  std::unordered_map<std::string, Entry> entries_;    // submitted somewhere in the subtree
  Ready up_;                                          // to be told to the parent
  std::uint64_t last_batch_ = 0;
  std::set<int> joined_;  // ranks of the subtree
  std::uint64_t submissions_ = 0;

  std::deque<StepMember> history_;  // the last operations that were decided, the same on all ranks
  DependencyQuery dependency_query_;
  std::uint64_t last_query_ = 0;
  std::optional<Plan> plan_;
  bool breaking_ = false;        // this rank has said, or heard, that the plan ends
  bool halted_ = false;          // it joins no further batch
  std::set<int> halt_missing_;   // children that have not said how far they are
  std::uint64_t halted_at_ = 0;  // the least that was joined in the subtree, so far
  bool join_later_ = false;      // once the plan has ended

  // Root only.
  StepPattern step_pattern_;
  std::vector<std::uint64_t> queried_step_;  // the step of the query, as the watch has it
  std::uint64_t queries_ = 0;
  Tuner tuner_;
  int steps_wanted_;                     // identical ones, before the next plan
  std::optional<Status> failure_later_;  // of everything, once the plan has ended
  std::deque<ReadyOperation> ready_;
  std::vector<DecisionItem> urgent_;  // errors and the end, which wait for nothing
  std::unordered_set<std::string> seen_once_;
  std::uint64_t batches_decided_ = 0;
  int outstanding_ = 0;
  int last_joined_ = -1;
  std::uint32_t next_id_ = 0;

  std::vector<Outgoing> outgoing_;
  std::vector<Decision> decisions_;
};

}  // namespace horoplug
