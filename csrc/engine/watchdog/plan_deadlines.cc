#include "engine/watchdog/plan_deadlines.h"

#include <algorithm>

#include "base/time.h"
#include "engine/watchdog/limits.h"

namespace horoplug {
namespace {

// How long a plan may stand still: while a thread of this rank waits for an operation that the
// plan holds up, and while peers have not joined a batch that this rank has joined.
constexpr Seconds kPatienceOfWaiters{0.002};
constexpr Seconds kPatienceWithPeers{1};

}  // namespace

Seconds PlanDeadlines::patience(const ProcessSet& set, SteadyTime now) const {
  if (set.negotiator().waits_in_plan()) {
    // Peers may be late for a good reason, which only negotiation finds out.
    return std::min(kPatienceWithPeers, progress_limit(options_).time / 4);
  }
  if (!set.negotiator().held_up()) return kForever;
  const bool has_waiters =
      std::any_of(set.pending().begin(), set.pending().end(),
                  [&](const auto& entry) { return handles_.waited_for(*entry.second, now); });
  // The queue may hold what the plan lacks, and the loop takes it before it checks the plans again.
  // A thread submits before it waits, so the queue is looked at after the waiters.
  if (submissions_.holds_any()) return kForever;
  return has_waiters ? kPatienceOfWaiters : set.plan_patience();
}

void PlanDeadlines::check(RunningTime now) {
  for (ProcessSet& set : registry_.sets()) {
    if (!set.negotiator().has_plan()) continue;
    RunningTime since = set.last_event();
    if (!set.negotiator().held_up()) since = std::max(since, set.last_progress());
    if (now - since >= patience(set, steady_now())) set.break_plan();
  }
}

}  // namespace horoplug
