// The Negotiator's way into a plan, through it and out of it.
#include <algorithm>
#include <limits>

#include "base/hash.h"
#include "controller/negotiator.h"

namespace horoplug {
namespace {

// A plan that did not live for this many times the steps that it took to learn was locked too soon.
constexpr std::uint64_t kWorthIt = 8;
constexpr int kMostSteps = 1 << 16;

}  // namespace

// ---- learning ----

void Negotiator::note_decided(const std::vector<ReadyOperation>& batch) {
  for (const ReadyOperation& operation : batch) {
    if (!operation.absent.empty() || is_administrative(operation.signature.op)) {
      watch_.disturb();
    } else {
      const std::uint64_t contents = digest(operation.signature);
      watch_.note(Hash().add(step_key(operation.name, operation.signature)).add(contents).value());
    }
  }
}

void Negotiator::remember(const std::string& name, const Signature& signature, std::uint64_t wave) {
  if (wave == kNoWave || is_administrative(signature.op)) {
    history_.clear();
    return;
  }
  history_.push_back({step_key(name, signature), signature, wave});
  if (history_.size() > StepWatch::kMostOperations) history_.pop_front();
}

// Root only: what comes after a batch that was just decided, a survey, a plan or nothing.
std::optional<DecisionItem> Negotiator::consider_plan() {
  if (options_.plan_after <= 0 || place_.size() == 1 || !watch_.at_boundary()) return std::nullopt;
  const auto& step = watch_.step();
  const bool is_surveyed = survey_.number() > 0 && surveyed_.size() == step.size() &&
                           std::is_permutation(surveyed_.begin(), surveyed_.end(), step.begin());
  DecisionItem item;
  item.batch = surveys_;
  if (is_surveyed && survey_.complete()) {
    if (plan_would_break()) return std::nullopt;
    item.kind = DecisionItem::Kind::kLock;
    item.choices = tuner_.choices(survey_.step(), survey_.labels(), options_.fusion_threshold,
                                  options_.fuse_groups);
    item.rounds = tuner_.rounds();
    return item;
  }
  // Two steps are alike at the first repetition.
  if (is_surveyed || watch_.repeated() + 2 < steps_wanted_) return std::nullopt;
  surveyed_ = step;
  item.kind = DecisionItem::Kind::kSurvey;
  item.batch = ++surveys_;
  item.operations = static_cast<std::uint32_t>(step.size());
  return item;
}

// Somebody has submitted, or is about to do, what the plan will not have.
bool Negotiator::plan_would_break() const {
  if (!joined_.empty() || !urgent_.empty()) return true;
  std::unordered_set<std::string> keys;
  for (const StepMember& member : survey_.step()) keys.insert(member.key);
  return std::any_of(entries_.begin(), entries_.end(), [&](const auto& entry) {
    return !keys.contains(step_key(entry.first, entry.second.camps.front().signature));
  });
}

void Negotiator::take_part_in(const DecisionItem& item) {
  if (item.operations == 0 || item.operations > history_.size()) {
    throw WireError("a survey of what has not run");
  }
  std::vector<StepMember> step(history_.end() - item.operations, history_.end());
  last_survey_ = item.batch;
  survey_ = Survey(item.batch, std::move(step), place_.children.size());
  answer_survey();
}

void Negotiator::answer_survey() {
  if (!survey_.complete() || is_root()) return;
  outgoing_.push_back({place_.parent, encode(set_, Waves{survey_.number(), survey_.labels()})});
}

void Negotiator::receive(int from, const Waves& waves) {
  child_index(from);
  if (waves.survey > last_survey_) throw WireError("a survey of the future");
  if (waves.survey != survey_.number() || closed()) return;  // it was given up meanwhile
  if (!survey_.add(waves.labels)) throw WireError("an answer that does not fit the survey");
  answer_survey();
}

// ---- locking ----

void Negotiator::lock(const DecisionItem& item) {
  if (!survey_.complete() || item.batch != survey_.number()) {
    throw WireError("a plan of what was not asked for");
  }
  ++epoch_;
  plan_.emplace(epoch_, last_batch_, survey_.step(), item.choices, item.rounds);
  // All of this was about operations that are pending; readiness counts for the plan from here on.
  entries_.clear();
  ready_.clear();
  up_ = {};
  survey_ = {};
  history_.clear();
  watch_.disturb();
  breaking_ = halted_ = false;
  if (joined_.contains(place_.rank)) {
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
        {place_.parent, encode(MessageKind::kBreak, set_, PlanNotice{plan_->epoch(), 0})});
  }
}

void Negotiator::receive(int from, MessageKind kind, const PlanNotice& notice) {
  if (closed()) return;
  const std::uint32_t current = plan_ ? plan_->epoch() : 0;
  if (kind == MessageKind::kHalt) {
    if (from != place_.parent) throw WireError("it is not the parent of this rank");
    if (!plan_ || notice.epoch != current || halted_)
      throw WireError("there is no such plan to halt");
    breaking_ = true;
    halt();
    return;
  }
  child_index(from);
  if (kind == MessageKind::kBreak) {
    if (notice.epoch > epoch_) throw WireError("a plan of the future");
    if (notice.epoch == current) break_plan();  // otherwise it has ended meanwhile
    return;
  }
  if (!plan_ || notice.epoch != current || !halted_ || halt_missing_.erase(from) == 0) {
    throw WireError("nobody has asked how far it is");
  }
  halted_at_ = std::min(halted_at_, notice.batch);
  answer_halt();
}

void Negotiator::halt() {
  halted_ = true;
  halted_at_ = plan_->joined();
  halt_missing_.insert(place_.children.begin(), place_.children.end());
  for (const int child : place_.children) {
    outgoing_.push_back({child, encode(MessageKind::kHalt, set_, PlanNotice{plan_->epoch(), 0})});
  }
  answer_halt();
}

void Negotiator::answer_halt() {
  if (!halt_missing_.empty()) return;
  if (!is_root()) {
    const PlanNotice notice{plan_->epoch(), halted_at_};
    outgoing_.push_back({place_.parent, encode(MessageKind::kHalted, set_, notice)});
    return;
  }
  const std::uint64_t steps = plan_->steps_joined();
  const bool was_worth_it =
      tuner_.trial_over() || steps >= kWorthIt * static_cast<std::uint64_t>(steps_wanted_);
  tuner_.plan_ended();
  steps_wanted_ = was_worth_it ? options_.plan_after : std::min(2 * steps_wanted_, kMostSteps);
  DecisionItem item;
  item.kind = DecisionItem::Kind::kUnlock;
  item.batch = halted_at_;
  publish({item});
  if (failure_later_) fail_all(*std::exchange(failure_later_, std::nullopt));
}

void Negotiator::unlock(const DecisionItem& item) {
  const std::uint64_t joined = plan_->joined();
  if (!halted_ || item.batch > joined || joined - item.batch > (plan_->running() ? 1 : 0)) {
    throw WireError("a plan that ends where it cannot");
  }
  // What all have joined runs to its end.
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

  // Everything else is ready, and not negotiated.
  for (const auto* entry : pending_in_order()) enter(entry->first, entry->second.signature);
  if (std::exchange(join_later_, false)) note_join(place_.rank);
}

}  // namespace horoplug
