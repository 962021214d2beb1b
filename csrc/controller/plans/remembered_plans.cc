#include "controller/plans/remembered_plans.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace horoplug {
namespace {

// A plan that breaks after fewer steps costs more than it saves.
constexpr std::uint64_t kFewestSteps = 8;
constexpr int kMostEarlyBreaks = 2;
constexpr int kMostPenalty = 64;

}  // namespace

std::size_t RememberedPlans::add(const std::vector<StepMember>& step,
                                 const std::vector<std::uint32_t>& labels) {
  Place place{{step, labels}};
  for (const StepMember& member : place.known.step) {
    place.slots.emplace(member.key, place.operations.size());
    place.operations.push_back(operation_digest(member.key, member.signature));
    place.digest.add(place.operations.back());
  }
  // The same step with other labels, a free place, or the least recently used one.
  const auto rank = [&](std::size_t i) {
    if (i == installed_) return std::numeric_limits<std::uint64_t>::max();
    if (!places_[i]) return std::uint64_t{1};
    return places_[i]->digest == place.digest ? 0 : 1 + places_[i]->used;
  };
  std::size_t at = 0;
  for (std::size_t i = 1; i < places_.size(); ++i) {
    if (rank(i) < rank(at)) at = i;
  }
  place.used = ++uses_;
  places_[at] = std::move(place);
  return at;
}

std::optional<std::size_t> RememberedPlans::find_step(const RecentOperations& recent) const {
  for (std::size_t i = 0; i < places_.size(); ++i) {
    if (places_[i] && recent.ends_with(places_[i]->operations.front(), places_[i]->digest)) {
      return i;
    }
  }
  return std::nullopt;
}

// The number of batches at the beginning of a step that consist of just these operations.
std::optional<std::size_t> RememberedPlans::batches_with(const Place& place,
                                                         const StepDigest& joined) const {
  if (joined.operations() == 0) return 0;
  // A key that occurs several times in a step could have been joined at a later position.
  if (place.slots.size() != place.operations.size()) return std::nullopt;
  if (place.known.choices.empty()) return std::nullopt;
  const PlanContents& batches = place.known.choices.front().batches;
  StepDigest begin;
  for (std::size_t i = 0; i + 1 < batches.size(); ++i) {
    for (const std::uint32_t slot : batches[i]) begin.add(place.operations[slot]);
    if (begin == joined) return i + 1;
    if (begin.operations() >= joined.operations()) break;
  }
  return std::nullopt;
}

std::optional<RememberedPlans::Continuation> RememberedPlans::find_continuation(
    const ReadyOperation& ready, std::span<const std::uint32_t> joined,
    const PendingOperations& pending) const {
  StepDigest run;
  for (const std::uint32_t slot : joined) run.add(places_[*installed_]->operations[slot]);
  const auto in_order = pending.in_order();
  const auto fits = [](const Place& place, std::string_view key, const Signature& signature) {
    const auto found = place.slots.find(std::string(key));
    return found != place.slots.end() &&
           compatible(place.known.step[found->second].signature, signature);
  };
  std::optional<Continuation> best;
  std::pair<std::size_t, std::uint64_t> most;  // operations that fit; then the last one used
  for (std::size_t i = 0; i < places_.size(); ++i) {
    if (i == installed_ || !places_[i]) continue;
    const Place& place = *places_[i];
    if (place.distrust > 0 || !fits(place, step_key(ready.name, ready.signature), ready.signature))
      continue;
    const auto skipped = batches_with(place, run);
    if (!skipped) continue;
    std::pair<std::size_t, std::uint64_t> fit{0, place.used};
    for (const auto* entry : in_order) {
      fit.first += fits(place, entry->first->key, entry->first->signature);
    }
    if (best && fit <= most) continue;
    best = {i, *skipped};
    most = fit;
  }
  return best;
}

void RememberedPlans::begun(std::size_t place, bool guessed) {
  installed_ = place;
  guessed_ = guessed;
  places_[place]->used = ++uses_;
}

RememberedPlans::End RememberedPlans::ended(std::uint64_t steps, bool broken) {
  std::optional<Place>& at = places_[*std::exchange(installed_, std::nullopt)];
  at->steps += steps;
  if (steps > 0) {
    at->distrust = std::max(0, at->distrust - 1);
  } else if (guessed_) {
    at->penalty = std::min(2 * at->penalty, kMostPenalty);
    at->distrust = at->penalty;
  }
  if (steps >= kFewestSteps) {
    at->early_breaks = 0;
  } else if (broken) {
    ++at->early_breaks;
  }
  const End end{at->steps, at->early_breaks >= kMostEarlyBreaks};
  if (end.forgotten) at.reset();
  return end;
}

}  // namespace horoplug
