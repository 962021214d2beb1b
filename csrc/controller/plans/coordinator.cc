#include "controller/plans/coordinator.h"

#include <unordered_set>
#include <utility>

#include "controller/state/refusal.h"

namespace horoplug {
namespace {

// Pauses in a row, without a batch of the plan between them, after which the program is taken to do
// something else now.
constexpr int kMostIdlePauses = 8;

}  // namespace

Coordinator::Coordinator(const Options& options, const RankState& state, const PlanFollower& plans,
                         PlanLearner& learner)
    : fusion_threshold_(options.fusion_threshold),
      fuse_groups_(options.fuse_groups),
      state_(state),
      plans_(plans),
      learner_(learner),
      queue_({options.fusion_threshold, options.fuse_groups, options.cache_capacity,
              options.max_outstanding}),
      tuner_(options.tuner, options.tuning, options.placement) {}

// ---- what there is to decide ----

void Coordinator::add(ReadinessTable::Complete complete) {
  RankRanges absent;
  if (complete.variants.size() == 1) {
    absent = state_.readiness.absent_from(complete.variants.front().ranks);
  }
  Status status = refusal(complete.name, complete.signature, complete.variants, absent);
  if (status.ok()) {
    queue_.add({std::move(complete.name), std::move(complete.signature), std::move(absent)});
  } else {
    queue_.add_error(complete.name, std::move(status));
  }
}

bool Coordinator::plan_step_done(double now) {
  tuner_.step_done(plans_.plan().last_choice(), now);
  return tuner_.trial_over();
}

// ---- negotiated operations ----

std::vector<DecisionItem> Coordinator::decide() {
  std::vector<DecisionItem> items = queue_.take_errors();
  // Operations that are ready when the set closes still run, so the end comes last. The same holds
  // for the end of a join: every rank waits for it, so nothing follows.
  const std::vector<DecisionItem> ends = queue_.take_ends();
  const bool all_joined = state_.readiness.all_joined();
  const bool run_all = all_joined || !ends.empty();
  while (queue_.has_batch(run_all)) {
    decide_batch(items);
    if (!run_all && consider_plan(items)) break;
  }
  if (all_joined) items.push_back(queue_.take_join(state_.readiness.last_joined()));
  items.insert(items.end(), ends.begin(), ends.end());
  return items;
}

void Coordinator::decide_batch(std::vector<DecisionItem>& items) {
  DecisionQueue::Batch batch = queue_.take_batch(state_.names);
  learner_.note_batch(batch.operations);
  items.push_back(std::move(batch.item));
}

// ---- the beginning of a plan ----

// Adds what follows the batch that was just decided: a dependency query, that the ranks remember
// its step, and a plan. Returns whether a plan is installed, which takes the place of a paused one
// only between two of its steps.
bool Coordinator::consider_plan(std::vector<DecisionItem>& items) {
  const DependencyQuery& query = learner_.query();
  if (const auto learned = learner_.take_learned()) {
    DecisionItem& item = items.emplace_back();
    item.kind = DecisionItem::Kind::kRememberPlan;
    item.batch = *learned;
    item.place = static_cast<std::uint32_t>(remembered_.add(query.step(), query.labels()));
  }
  const bool is_between_steps = !plans_.installed() || slots_joined().empty();
  const auto place = remembered_.find_step(learner_.recent());
  if (place && is_between_steps && !would_break(remembered_.at(*place).step)) {
    if (plans_.installed()) note_end_of_plan(false);
    remembered_.begun(*place, false);
    items.push_back(installation(*place, 0));
    return true;
  }
  if (const auto proposed = learner_.propose_query()) {
    DecisionItem& item = items.emplace_back();
    item.kind = DecisionItem::Kind::kDependencyQuery;
    item.batch = proposed->number;
    item.operations = proposed->operations;
  }
  return false;
}

// Another plan goes on with the operations that are ready. None of them has run outside of a plan,
// so that the place in the step is known.
bool Coordinator::consider_continuation(std::vector<DecisionItem>& items) {
  if (learner_.recent().size() > 0 || !queue_.has_batch(true)) return false;
  const auto found = remembered_.find_continuation(queue_.front(), slots_joined(), state_.pending);
  if (!found) return false;
  note_end_of_plan(false);
  remembered_.begun(found->place, true);
  items.push_back(installation(found->place, found->skipped));
  return true;
}

// A rank has joined, or has submitted an operation that the plan for this step lacks.
bool Coordinator::would_break(std::span<const StepMember> step) const {
  if (state_.readiness.any_joined()) return true;
  std::unordered_set<std::string> keys;
  for (const StepMember& member : step) keys.insert(member.key);
  return state_.readiness.any([&](const std::string& name, const Signature& signature) {
    return !keys.contains(std::string(step_key(name, signature)));
  });
}

// With the choices that the tuner wants by now. Batches can be skipped only with the choices of the
// last time.
DecisionItem Coordinator::installation(std::size_t place, std::size_t skipped) {
  DecisionItem item;
  item.kind = DecisionItem::Kind::kInstallPlan;
  item.place = static_cast<std::uint32_t>(place);
  item.skipped = static_cast<std::uint32_t>(skipped);
  if (skipped > 0) return item;
  RememberedPlans::Known& known = remembered_.at(place);
  auto choices = tuner_.choices(known.step, known.labels, fusion_threshold_, fuse_groups_);
  if (choices != known.choices || tuner_.rounds() != known.rounds) {
    known.choices = item.choices = std::move(choices);
    known.rounds = item.rounds = tuner_.rounds();
  }
  return item;
}

void Coordinator::plan_installed(std::uint64_t last_batch) {
  resumed_after_ = last_batch;
  idle_pauses_ = 0;
}

// ---- a plan that is halted ----

bool Coordinator::plan_is_abandoned() const { return idle_pauses_ >= kMostIdlePauses; }

std::vector<DecisionItem> Coordinator::end_plan() {
  const std::uint64_t last_batch = plans_.halt_state().last_batch();
  if (last_batch != resumed_after_) learner_.interrupt();
  // A plan does not count as broken if the program has stopped running its step.
  note_end_of_plan(!tuner_.trial_over() && !plan_is_abandoned());
  std::vector<DecisionItem> items(1);
  items.front().kind = DecisionItem::Kind::kUninstallPlan;
  items.front().batch = last_batch;
  return items;
}

std::vector<DecisionItem> Coordinator::pause_plan() {
  const std::uint64_t last_batch = plans_.halt_state().last_batch();
  std::vector<DecisionItem> items(1);
  items.front().kind = DecisionItem::Kind::kPausePlan;
  items.front().batch = last_batch;
  queue_.continue_after(last_batch);
  const bool is_idle = last_batch == resumed_after_;
  idle_pauses_ = is_idle ? idle_pauses_ + 1 : 0;
  if (!is_idle) learner_.interrupt();
  bool is_replaced = consider_continuation(items);
  while (!is_replaced && queue_.has_batch(false)) {
    decide_batch(items);
    is_replaced = consider_plan(items);
  }
  if (!is_replaced) items.emplace_back().kind = DecisionItem::Kind::kResumePlan;
  return items;
}

void Coordinator::note_end_of_plan(bool broken) {
  const bool settled = tuner_.trial_over();
  const auto end = remembered_.ended(plans_.plan().steps_joined(), broken);
  if (end.forgotten || settled) learner_.plan_ended(end.steps, settled);
  tuner_.plan_ended();
}

// The slots of the plan's step that all ranks have joined, while it is halted.
std::vector<std::uint32_t> Coordinator::slots_joined() const {
  return plans_.plan().slots_joined(plans_.halt_state().last_batch());
}

}  // namespace horoplug
