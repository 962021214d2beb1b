// The part of the Negotiator that installs, follows and uninstalls plans.
#include <algorithm>
#include <limits>

#include "base/hash.h"
#include "controller/negotiator.h"

namespace horoplug {
namespace {

// A plan that lasted for fewer steps than this multiple of the steps it took to learn was installed
// too early.
constexpr std::uint64_t kWorthIt = 8;
constexpr int kMostSteps = 1 << 16;

}  // namespace

// ---- learning ----

void Negotiator::note_decided(const std::vector<ReadyOperation>& batch) {
  for (const ReadyOperation& operation : batch) {
    if (!operation.absent.empty() || is_administrative(operation.signature.op)) {
      step_pattern_.disturb();
    } else {
      const std::uint64_t contents = digest(operation.signature);
      step_pattern_.note(
          Hash().add(step_key(operation.name, operation.signature)).add(contents).value());
    }
  }
}

void Negotiator::remember(const std::string& name, const Signature& signature,
                          std::uint64_t dependency_epoch) {
  if (dependency_epoch == kNoDependencyEpoch || is_administrative(signature.op)) {
    history_.clear();
    return;
  }
  history_.push_back({step_key(name, signature), signature, dependency_epoch});
  if (history_.size() > StepPattern::kMostOperations) history_.pop_front();
}

// Root only: the item that follows a batch that was just decided: a dependency query, a plan, or
// none.
std::optional<DecisionItem> Negotiator::consider_plan() {
  if (options_.plan_after <= 0 || position_.size() == 1 || !step_pattern_.at_boundary())
    return std::nullopt;
  const auto& step = step_pattern_.step();
  const bool is_queried =
      dependency_query_.number() > 0 && queried_step_.size() == step.size() &&
      std::is_permutation(queried_step_.begin(), queried_step_.end(), step.begin());
  DecisionItem item;
  item.batch = queries_;
  if (is_queried && dependency_query_.complete()) {
    if (plan_would_break()) return std::nullopt;
    item.kind = DecisionItem::Kind::kInstallPlan;
    item.choices = tuner_.choices(dependency_query_.step(), dependency_query_.labels(),
                                  options_.fusion_threshold, options_.fuse_groups);
    item.rounds = tuner_.rounds();
    return item;
  }
  // The first repetition means two equal steps.
  if (is_queried || step_pattern_.repeated() + 2 < steps_wanted_) return std::nullopt;
  queried_step_ = step;
  item.kind = DecisionItem::Kind::kDependencyQuery;
  item.batch = ++queries_;
  item.operations = static_cast<std::uint32_t>(step.size());
  return item;
}

// An operation that the plan lacks has been submitted, or a decision is due that it cannot contain.
bool Negotiator::plan_would_break() const {
  if (!joined_.empty() || !urgent_.empty()) return true;
  std::unordered_set<std::string> keys;
  for (const StepMember& member : dependency_query_.step()) keys.insert(member.key);
  return std::any_of(entries_.begin(), entries_.end(), [&](const auto& entry) {
    return !keys.contains(step_key(entry.first, entry.second.groups.front().signature));
  });
}

void Negotiator::join_dependency_query(const DecisionItem& item) {
  if (item.operations == 0 || item.operations > history_.size()) {
    throw WireError("dependency query for operations that have not run");
  }
  std::vector<StepMember> step(history_.end() - item.operations, history_.end());
  last_query_ = item.batch;
  dependency_query_ = DependencyQuery(item.batch, std::move(step), position_.children.size());
  answer_dependency_query();
}

void Negotiator::answer_dependency_query() {
  if (!dependency_query_.complete() || is_root()) return;
  outgoing_.push_back(
      {position_.parent,
       encode(set_, DependencyLabels{dependency_query_.number(), dependency_query_.labels()})});
}

void Negotiator::receive(int from, const DependencyLabels& labels) {
  child_index(from);
  if (labels.query > last_query_) throw WireError("answer to a future dependency query");
  // the query was abandoned meanwhile
  if (labels.query != dependency_query_.number() || closed()) return;
  if (!dependency_query_.add(labels.labels))
    throw WireError("answer that does not match the dependency query");
  answer_dependency_query();
}

// ---- installing ----

void Negotiator::install_plan(const DecisionItem& item) {
  if (!dependency_query_.complete() || item.batch != dependency_query_.number()) {
    throw WireError("plan without a completed dependency query");
  }
  ++epoch_;
  plan_.emplace(epoch_, last_batch_, dependency_query_.step(), item.choices, item.rounds);
  // Negotiation state is obsolete: from here on readiness counts for the plan.
  entries_.clear();
  ready_.clear();
  up_ = {};
  dependency_query_ = {};
  history_.clear();
  step_pattern_.disturb();
  breaking_ = halted_ = false;
  if (joined_.contains(position_.rank)) {
    join_later_ = true;
    break_plan();
  }
  joined_.clear();
  for (const auto* entry : pending_in_order()) {
    if (!plan_->ready(entry->first, entry->second.signature)) break_plan();
  }
}

std::vector<const std::pair<const std::string, Negotiator::Pending>*> Negotiator::pending_in_order()
    const {
  std::vector<const std::pair<const std::string, Pending>*> entries;
  for (const auto& entry : pending_) entries.push_back(&entry);
  std::sort(entries.begin(), entries.end(),
            [](const auto* a, const auto* b) { return a->second.order < b->second.order; });
  return entries;
}

std::size_t Negotiator::submissions_wanted() const {
  if (!plan_ || breaking_) return 1;
  const std::size_t missing = plan_->missing();
  return missing > 0 ? missing : std::numeric_limits<std::size_t>::max();
}

void Negotiator::join_plan() {
  if (halted_ || !plan_->join_next()) return;
  Decision decision;
  decision.kind = DecisionItem::Kind::kBatch;
  decision.batch = plan_->joined();
  decision.plan = plan_->epoch();
  decision.names = plan_->last();
  decision.tuning = plan_->last_tuning();
  decisions_.push_back(std::move(decision));
}

// ---- leaving ----

void Negotiator::break_plan() {
  if (!plan_ || breaking_) return;
  breaking_ = true;
  if (is_root()) {
    halt();
  } else {
    outgoing_.push_back(
        {position_.parent, encode(MessageKind::kBreak, set_, PlanNotice{plan_->epoch(), 0})});
  }
}

void Negotiator::receive(int from, MessageKind kind, const PlanNotice& notice) {
  if (closed()) return;
  const std::uint32_t current = plan_ ? plan_->epoch() : 0;
  if (kind == MessageKind::kHalt) {
    if (from != position_.parent) throw WireError("the sender is not the parent of this rank");
    if (!plan_ || notice.epoch != current || halted_)
      throw WireError("halt of a plan that is not installed");
    breaking_ = true;
    halt();
    return;
  }
  child_index(from);
  if (kind == MessageKind::kBreak) {
    if (notice.epoch > epoch_) throw WireError("message about a future plan");
    if (notice.epoch == current) break_plan();  // otherwise the plan has ended meanwhile
    return;
  }
  if (!plan_ || notice.epoch != current || !halted_ || halt_missing_.erase(from) == 0) {
    throw WireError("halt report without a halt");
  }
  halted_at_ = std::min(halted_at_, notice.batch);
  answer_halt();
}

void Negotiator::halt() {
  halted_ = true;
  halted_at_ = plan_->joined();
  halt_missing_.insert(position_.children.begin(), position_.children.end());
  for (const int child : position_.children) {
    outgoing_.push_back({child, encode(MessageKind::kHalt, set_, PlanNotice{plan_->epoch(), 0})});
  }
  answer_halt();
}

void Negotiator::answer_halt() {
  if (!halt_missing_.empty()) return;
  if (!is_root()) {
    const PlanNotice notice{plan_->epoch(), halted_at_};
    outgoing_.push_back({position_.parent, encode(MessageKind::kHalted, set_, notice)});
    return;
  }
  const std::uint64_t steps = plan_->steps_joined();
  const bool was_worth_it =
      tuner_.trial_over() || steps >= kWorthIt * static_cast<std::uint64_t>(steps_wanted_);
  tuner_.plan_ended();
  steps_wanted_ = was_worth_it ? options_.plan_after : std::min(2 * steps_wanted_, kMostSteps);
  DecisionItem item;
  item.kind = DecisionItem::Kind::kUninstallPlan;
  item.batch = halted_at_;
  publish({item});
  if (failure_later_) fail_all(*std::exchange(failure_later_, std::nullopt));
}

void Negotiator::uninstall_plan(const DecisionItem& item) {
  const std::uint64_t joined = plan_->joined();
  if (!halted_ || item.batch > joined || joined - item.batch > (plan_->running() ? 1 : 0)) {
    throw WireError("plan ended at an impossible batch");
  }
  // A batch that all ranks have joined runs to completion.
  if (plan_->running() && joined == item.batch) {
    for (const std::string& name : plan_->last()) pending_.erase(name);
  }
  Decision decision;
  decision.kind = item.kind;
  decision.batch = item.batch;
  decision.plan = plan_->epoch();
  decisions_.push_back(std::move(decision));
  plan_.reset();
  breaking_ = halted_ = false;
  last_batch_ = item.batch;
  if (is_root()) batches_decided_ = item.batch;
  ++epoch_;

  // All other ready operations return to negotiation.
  for (const auto* entry : pending_in_order()) enter(entry->first, entry->second.signature);
  if (std::exchange(join_later_, false)) note_join(position_.rank);
}

}  // namespace horoplug
