#include "engine/shutdown.h"

#include <string>
#include <utility>

#include "base/time.h"
#include "collectives/gpu/gpu_group.h"
#include "controller/messages/messages.h"

namespace horoplug {
namespace {

// Peers answer a goodbye at once, unless they are stopped or gone.
constexpr Seconds kTimeForGoodbye{2};
// How long an engine that has failed waits until its peers have received why.
constexpr Seconds kTimeForLastWords{0.5};

}  // namespace

// ---- failure ----

void Shutdown::fail(const Status& status) {
  Mesh& mesh = parts_.mesh;
  parts_.counters.failed = 1;
  parts_.config.log(status.code == HP_SHUT_DOWN ? LogLevel::kInfo : LogLevel::kError,
                    status.message);
  parts_.lifecycle.note_failure(status);
  parts_.submissions.fail(status);
  // The peers are told first: when this rank's own operations have ended, its program may exit at
  // once, and the peers would blame this rank.
  mesh.send_control_to_connected(encode(Abort{status.code, status.message}));
  mesh.close_writes();
  parts_.gpu.abort();
  end_all_operations();
  // A peer that has received this fails as well, and closes its connections. Unresponsive peers are
  // not waited for.
  mesh.drop_input();
  const SteadyTime until = steady_now() + kTimeForLastWords;
  while (!mesh.all_closed_by_peers() && steady_now() < until) {
    if (!mesh.pump()) mesh.sleep(Seconds(0.01), [] { return false; });
  }
  stop();
}

void Shutdown::end_all_operations() {
  std::vector<OperationPtr> operations;
  const auto add = [&](const std::vector<OperationPtr>& more) {
    operations.insert(operations.end(), more.begin(), more.end());
  };
  for (ProcessSet& set : parts_.registry.sets()) add(set.take_all());
  add(parts_.point_to_point.take_all());
  add(parts_.submissions.drain());
  // Once an operation has ended, the program may change its tensors: their coroutines, and with
  // them the queued frames (Comm::Queued, PointToPoint::take_all), are gone by now.
  parts_.completion.end(operations, parts_.submissions.end());
}

// ---- leaving ----

bool Shutdown::advance(RunningTime now) {
  // Also a set that was created after this rank had said that it leaves.
  for (ProcessSet& set : parts_.registry.sets()) {
    // Closed by the leaving of another rank, after which this one went on with sends and recvs.
    if (set.leave() && set.negotiator().closed()) {
      parts_.point_to_point.fail(set.number(), parts_.submissions.end());
    }
  }
  if (parts_.lifecycle.state() == Lifecycle::State::kRunning) {
    parts_.lifecycle.enter(Lifecycle::State::kLeaving);
    since_ = now;
    return true;
  }
  if (!is_everything_done(now)) return false;
  if (!parts_.peers.said_bye()) {
    if (!std::exchange(waits_for_gpus_, true)) since_ = now;
    if (!parts_.gpu.is_over() && now - since_ < kTimeForGoodbye) return false;
    since_ = now;
    parts_.peers.say_bye();
    return true;
  }
  if (!parts_.mesh.all_closed_by_peers() && now - since_ < kTimeForGoodbye) return false;
  for (GpuGroup* const gpu : parts_.registry.gpus()) gpu->close();
  stop();
  return true;
}

// Whether all that was decided before this rank leaves is done, and all ranks agree to its leaving.
// Throws Error if they do not answer in time.
bool Shutdown::is_everything_done(RunningTime now) {
  // The memory of tensors must stay while the GPU may use it.
  parts_.transfers.check_gpus(now);
  bool agreed = true, busy = parts_.gpu.is_busy() || !parts_.point_to_point.idle();
  for (const ProcessSet& set : parts_.registry.sets()) {
    busy |= !set.executor().idle();
    agreed &= set.negotiator().closed();
  }
  // The watchdog limits how long; the peers' time to agree begins afterwards.
  if (busy) since_ = now;
  if (busy || agreed) return !busy;
  if (now - since_ < kTimeForGoodbye) return false;
  // The peers must not wait for this rank either.
  throw Error(HP_SHUT_DOWN, "rank " + std::to_string(parts_.config.rank) + " has shut down");
}

void Shutdown::stop() {
  end_all_operations();
  parts_.mesh.close_polled();  // a program that waits for the end may finalize MPI next
  if (parts_.config.mpi) parts_.config.mpi->close();
  parts_.tracing.stop();
  parts_.lifecycle.enter(Lifecycle::State::kStopped);
}

}  // namespace horoplug
