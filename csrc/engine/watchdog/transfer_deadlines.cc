#include "engine/watchdog/transfer_deadlines.h"

#include <utility>
#include <vector>

#include "base/time.h"
#include "collectives/gpu/gpu_group.h"

namespace horoplug {

bool TransferDeadlines::check_transfers(double now) {
  // Control messages (wake-ups, stall inspections) are no progress.
  const std::uint64_t data = mesh_.data_moved();
  const bool moved = std::exchange(last_data_moved_, data) != data;
  const double limit = or_never(config_.options.data_timeout);
  const bool framework_is_busy = gpu_.waits_for_framework();
  bool late = check_point_to_point(now, moved);
  for (const auto& [id, set] : registry_.sets()) {
    // A batch that polls the GPU waits for the work that the framework has given it.
    const bool waits_for_framework = framework_is_busy && set->executor.polled();
    if ((set->executor.idle() && !set->removal) || moved || waits_for_framework) {
      set->last_progress = now;
    }
    late |= now - set->last_progress >= limit / 2;
    if (now - set->last_progress < limit) continue;
    const Batch* running = set->executor.running();
    throw Error(HP_TIMEOUT, (running != nullptr ? running->describe() : set->removal->describe()) +
                                " has made no progress for " + describe_seconds(limit) +
                                ", waiting for " + blame(*set) +
                                " (HOROVOD_GLOO_TIMEOUT_SECONDS sets this limit)");
  }
  return late;
}

// `moved`: data has moved over any link.
bool TransferDeadlines::check_point_to_point(double now, bool moved) const {
  if (moved || point_to_point_.idle()) point_to_point_.last_progress = now;
  const double limit = or_never(config_.options.data_timeout);
  const double seconds = now - point_to_point_.last_progress;
  if (seconds < limit) return seconds >= limit / 2;
  const std::vector<int> peers = point_to_point_.peers();
  const std::string silent = liveness_.describe_silent(peers);
  throw Error(HP_TIMEOUT, point_to_point_.describe_oldest() + " has made no progress for " +
                              describe_seconds(limit) + ", waiting for " +
                              (silent.empty() ? describe_ranks(peers) : silent) +
                              " (HOROVOD_GLOO_TIMEOUT_SECONDS sets this limit)");
}

// The ranks that keep a set from going on. Those that this rank waits for may wait themselves: if
// some ranks do not answer, those are to blame.
std::string TransferDeadlines::blame(const ProcessSet& set) const {
  // A batch that takes turns may wait for batches of other sets, and so for any rank.
  const Batch* const running = set.executor.running();
  const bool takes_turns = running != nullptr && running->turns != nullptr;
  std::vector<int> ranks = (takes_turns ? registry_.global() : set).members->ranks;
  std::erase(ranks, config_.rank);
  if (std::string silent = liveness_.describe_silent(ranks); !silent.empty()) return silent;
  return describe_ranks(running != nullptr ? set.executor.blame() : ranks);
}

// Nothing says for which rank a GPU waits.
bool TransferDeadlines::check_gpus(double now) {
  const double limit = or_never(config_.options.data_timeout);
  bool late = false;
  for (const auto& [id, set] : registry_.sets()) {
    GpuGroup* const gpu = set->executor.gpu();
    const double seconds = gpu != nullptr ? gpu->standstill(now) : 0;
    late |= seconds >= limit / 2;
    if (seconds < limit) continue;
    const std::string silent = liveness_.describe_silent(registry_.global().members->ranks);
    throw Error(HP_TIMEOUT, gpu->next() + " has not ended on the GPU for " +
                                describe_seconds(limit) +
                                (silent.empty() ? ", though all ranks answer" : ", waiting for ") +
                                silent + " (HOROVOD_GLOO_TIMEOUT_SECONDS sets this limit)");
  }
  return late;
}

void TransferDeadlines::excuse(double seconds) {
  point_to_point_.last_progress += seconds;
  for (const auto& [id, set] : registry_.sets()) {
    set->last_progress += seconds;
    if (GpuGroup* const gpu = set->executor.gpu()) gpu->excuse(seconds);
  }
}

}  // namespace horoplug
