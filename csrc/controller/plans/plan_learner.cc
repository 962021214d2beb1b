#include "controller/plans/plan_learner.h"

#include <algorithm>

#include "base/wire.h"

namespace horoplug {
namespace {

// A plan that lasted for fewer steps than this multiple of the steps it took to learn was installed
// too early.
constexpr std::uint64_t kWorthIt = 8;
constexpr int kMostSteps = 1 << 16;

}  // namespace

void PlanLearner::note(const Identity& operation, std::uint64_t dependency_stage) {
  if (dependency_stage == kNoDependencyStage || is_administrative(operation.signature.op)) {
    history_.clear();
    return;
  }
  history_.push_back({std::string(operation.key), operation.signature, dependency_stage});
  if (history_.size() > StepPattern::kMostOperations) history_.pop_front();
}

void PlanLearner::begin_query(std::uint64_t number, std::uint32_t operations) {
  if (operations == 0 || operations > history_.size()) {
    throw WireError("dependency query for operations that have not run");
  }
  std::vector<StepMember> step(history_.end() - operations, history_.end());
  last_query_ = number;
  query_ = DependencyQuery(number, std::move(step), children_);
}

bool PlanLearner::add_answer(std::uint64_t query, const std::vector<std::uint32_t>& labels) {
  if (query > last_query_) throw WireError("answer to a future dependency query");
  if (query != query_.number()) return false;
  if (!query_.add(labels)) throw WireError("answer that does not match the dependency query");
  return true;
}

void PlanLearner::reset() {
  query_ = {};
  history_.clear();
  pattern_.disturb();
  recent_.clear();
}

void PlanLearner::note_batch(const std::vector<ReadyOperation>& batch) {
  for (const ReadyOperation& operation : batch) {
    if (!operation.absent.empty() || is_administrative(operation.signature.op)) {
      pattern_.disturb();
      recent_.clear();
    } else {
      const std::uint64_t number =
          operation_digest(step_key(operation.name, operation.signature), operation.signature);
      pattern_.note(number, &operation == &batch.front());
      recent_.note(number);
    }
  }
}

std::optional<PlanLearner::Query> PlanLearner::propose_query() {
  if (plan_after_ <= 0 || !pattern_.at_boundary()) return std::nullopt;
  const StepDigest& step = pattern_.step();
  if (recent_.size() < 2 * step.operations()) return std::nullopt;
  const bool is_queried = query_.number() > 0 && queried_step_ == step;
  // The first repetition means two equal steps.
  if (is_queried || pattern_.repeated() + 2 < steps_wanted_) return std::nullopt;
  queried_step_ = step;
  return Query{++queries_, static_cast<std::uint32_t>(step.operations())};
}

std::optional<std::uint64_t> PlanLearner::take_learned() {
  if (!query_.complete() || query_.number() == learned_) return std::nullopt;
  return learned_ = query_.number();
}

void PlanLearner::plan_ended(std::uint64_t steps, bool settled) {
  const bool was_worth_it =
      settled || steps >= kWorthIt * static_cast<std::uint64_t>(steps_wanted_);
  steps_wanted_ = was_worth_it ? plan_after_ : std::min(2 * steps_wanted_, kMostSteps);
}

}  // namespace horoplug
