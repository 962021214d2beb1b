#include "engine/watchdog/transfer_deadlines.h"

#include <algorithm>

#include "base/time.h"
#include "collectives/gpu/gpu_group.h"

namespace horoplug {

std::string TransferDeadlines::limit_is_set_by() const {
  return " (" + progress_limit(config_.options).set_by() + ")";
}

void TransferDeadlines::check_transfers(RunningTime now) {
  mesh_.take_movement(movement_);
  point_to_point_.note_progress(now, movement_.ranks);
  check_point_to_point(now);
  for (ProcessSet& set : registry_.sets()) {
    if (makes_progress(set)) set.note_progress(now);
    check_batch(set, now);
  }
}

// The scheduler notes when the coroutine of the batch passes a wait.
bool TransferDeadlines::makes_progress(const ProcessSet& set) const {
  const Executor& executor = set.executor();
  const Batch* const running = executor.running();
  if (running == nullptr) {
    // A batch that has not begun waits for those of other sets. A removal waits for sends and
    // recvs. They all have their own limits.
    return !executor.idle() || set.removal() == nullptr ||
           point_to_point_.has_transfers(set.number());
  }
  // A batch that polls the GPU waits for the work that the framework has given it.
  if (gpu_.waits_for_framework() && executor.polled()) return true;
  if (movement_.flows.contains(Link::flow_of(*executor.channel()))) return true;
  if (set.negotiator().waits_in_plan()) return false;
  const std::vector<int> ranks = executor.blame();
  const auto moves = [this](int rank) { return movement_.ranks[static_cast<std::size_t>(rank)]; };
  // A batch that takes turns waits for one of the ranks that another batch waits for.
  if (running->turns != nullptr) return std::any_of(ranks.begin(), ranks.end(), moves);
  return !ranks.empty() && std::all_of(ranks.begin(), ranks.end(), moves);
}

void TransferDeadlines::check_batch(const ProcessSet& set, RunningTime now) {
  const Seconds waited = now - set.last_progress();
  if (!Suspicion::arises(waited, limit())) return;
  const std::vector<int> all = suspects(set);
  const std::vector<int> asked = within_reach(all, set.executor().blame());
  const auto finding = suspicion_.examine(asked, waited, limit(), now);
  if (!finding.is_late) return;
  // A rank that this one has no connection to may be to blame. Those that wait for it have one, and
  // reach the limit now.
  const bool others_may_report = finding.silent.empty() && asked.size() < all.size();
  if (others_may_report && waited < limit() + Suspicion::patience(limit())) return;
  const Batch* const running = set.executor().running();
  fail(running != nullptr ? running->describe() : set.removal()->describe(),
       finding.blame(running != nullptr ? set.executor().blame() : all));
}

void TransferDeadlines::fail(const std::string& what, const std::string& blamed) const {
  throw Error(HP_TIMEOUT, what + " has made no progress for " + describe_seconds(limit()) +
                              ", waiting for " + blamed + limit_is_set_by());
}

void TransferDeadlines::check_point_to_point(RunningTime now) {
  const auto longest = point_to_point_.longest_standstill();
  if (!longest) return;
  const std::vector<int> peer{longest->peer};
  const auto finding = suspicion_.examine(peer, now - longest->last_progress, limit(), now);
  if (finding.is_late) fail(longest->operation.describe(), finding.blame(peer));
}

// The ranks that may keep a set from going on.
std::vector<int> TransferDeadlines::suspects(const ProcessSet& set) const {
  // A batch that takes turns may wait for batches of other sets, and so for any rank.
  const Batch* const running = set.executor().running();
  const bool takes_turns = running != nullptr && running->turns != nullptr;
  std::vector<int> ranks = (takes_turns ? registry_.global() : set).members()->ranks;
  std::erase(ranks, config_.rank);
  return ranks;
}

// Those of `ranks` that are connected with this one, or that it waits for. In a large job, asking
// all would make a connection between every two ranks.
std::vector<int> TransferDeadlines::within_reach(std::vector<int> ranks,
                                                 const std::vector<int>& awaited) const {
  std::erase_if(ranks, [&](int rank) {
    return !mesh_.connected(rank) &&
           std::find(awaited.begin(), awaited.end(), rank) == awaited.end();
  });
  return ranks;
}

// Nothing says for which rank a GPU waits.
void TransferDeadlines::check_gpus(RunningTime now) {
  for (GpuGroup* const gpu : registry_.gpus()) {
    const Seconds ran = gpu->standstill(now);
    if (!Suspicion::arises(ran, limit())) continue;
    const std::vector<int>& all = registry_.global().members()->ranks;
    const std::vector<int> asked = within_reach(all, {});
    const auto finding = suspicion_.examine(asked, ran, limit(), now);
    if (!finding.is_late) continue;
    const std::string silent = finding.describe_silent();
    const std::string answer = asked.size() == all.size()
                                   ? ", though all ranks answer"
                                   : ", though all ranks answer that are connected with this one";
    throw Error(HP_TIMEOUT,
                gpu->next() + " has not ended on the GPU for " + describe_seconds(limit()) +
                    (silent.empty() ? answer : ", waiting for " + silent) + limit_is_set_by());
  }
}

}  // namespace horoplug
