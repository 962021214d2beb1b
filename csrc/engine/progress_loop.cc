// Who does the engine's work, and who sleeps meanwhile.
//
// The work is done by the thread that has set driven_: the progress thread, or a caller that waits
// for an operation. Nobody ever blocks for driven_; who does not get it sleeps, a caller on its
// operation's condition and the progress thread in Poller::doze(). A small operation of a caller
// that drives costs no other thread's wake-up: the doorbell says "awake", so that neither peers nor
// other threads of this process ring, and the progress thread is muted if sockets could wake it.
//
// No wake-up is lost. While driven_ is free, the doorbell says "asleep", and the progress thread is
// in doze() or on its way there or back; these bring it out:
//   - A ring and data on a socket. Who stops driving declares itself asleep first, looks for work
//     once more, lets go, and un-mutes then, which looks at what has come. The progress thread
//     mutes itself when it was woken and finds the engine driven; it tries once more after that,
//     and only dozes if this fails, too. Then somebody still drives, and un-mutes later. A rank
//     that has nothing under way rests: it is woken by submissions and sockets, but no longer by
//     flags in shared memory, which all belong to operations that it has done with, or not begun.
//   - Time. dozes_until_ says when it wakes at the latest; it is written before the progress thread
//     lets go or tries for the last time, and who stops driving reads it after letting go, and
//     kicks if something must be looked at sooner. Either the progress thread gets hold of driven_,
//     or who has it sees until when it dozes. (driven_, dozes_until_ and Poller's flag are
//     sequentially consistent.)
// A caller that sleeps on a condition leaves all of this to others: as long as its operation is
// pending, so is a time at which the progress thread looks. Submissions that a plan can do nothing
// with yet wake nobody (queue_submissions()); who waits for one of them, or asks for it, sees to it
// that they are taken (announce()).
#include <sched.h>

#include <algorithm>
#include <cmath>

#include "engine/engine.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace horoplug {
namespace {

// How many steps the progress thread looks for more before it sleeps, if no caller waits: what this
// process computes meanwhile needs the processor.
constexpr int kSpins = 50;
// A caller that leaves finishes what is as good as done.
constexpr int kLastSteps = 4;

// For so long after it has last got anywhere, a caller that waits for what is only polled stays
// awake, in seconds.
constexpr double kYields = 500e-6;

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

}  // namespace

bool Engine::is_crowded() const {
  const int host = config_.members[static_cast<std::size_t>(config_.rank)].host;
  int ranks = 0;
  for (const Member& member : config_.members) ranks += member.host == host ? 1 : 0;
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  return ::sched_getaffinity(0, sizeof cpus, &cpus) == 0 && CPU_COUNT(&cpus) < ranks;
}

// Whatever goes wrong in the body is thrown, and ends the engine here.
template <typename Body>
bool Engine::guarded(Body&& body) {
  try {
    return body();
  } catch (const PeerError& error) {
    fail({error.code(), "rank " + std::to_string(error.rank()) + ": " + error.what()});
  } catch (const Error& error) {
    fail(error.status());
  } catch (const std::exception& error) {
    fail({HP_INTERNAL, std::string("internal error: ") + error.what()});
  }
  return true;
}

bool Engine::guarded_step() {
  return guarded([this] { return step(); });
}

bool Engine::try_to_drive() {
  if (driven_.load(std::memory_order_relaxed) || driven_.exchange(true)) return false;
  doorbell_->finish_sleep();
  return true;
}

// Others may drive from here on. Whatever must be looked at before `seconds` have passed (negative:
// never) brings the progress thread to it.
void Engine::let_go(double seconds) {
  const double needed = seconds < 0 ? kNever : now() + seconds;
  driven_.store(false);
  mesh_->poller().unmute();
  if (needed < dozes_until_.load()) mesh_->poller().kick();
}

double Engine::watch_interval() const { return std::fmin(inspection_interval() / 4, 0.25); }

// Whether something may come that nobody announces.
bool Engine::must_poll() const {
  bool polls = mesh_->must_poll() || !removed_sets_.empty();
  for (const auto& [id, set] : sets_) {
    const bool ends = leaving_ || set->removal;
    polls |= set->executor.polled() || (ends && set->executor.gpu() != nullptr);
  }
  return polls;
}

// It is looked at ever more seldom: what comes is noticed late by a small part of the time that it
// took to come.
double Engine::poll_interval() const {
  constexpr double kPart = 1.0 / 16;
  constexpr double kLeast = 20e-6;
  constexpr double kMost = 5e-3;
  return std::clamp(kPart * (now() - quiet_since_), kLeast, kMost);
}

// How soon somebody has to watch(), or to look at connections that are polled; negative: nothing
// can go wrong that a peer would not tell.
double Engine::sleep_seconds() const {
  bool waiting =
      state_ == State::kStarting || leaving_ || (stall_inspection_ && stall_inspection_->running());
  for (const auto& [id, set] : sets_) {
    waiting |= !set->pending.empty() || !set->executor.idle() || set->removal;
  }
  waiting |= gpu_is_busy();
  const bool polls = must_poll();
  if (!waiting && !polls) return -1;
  double seconds = watch_interval();
  if (polls) seconds = std::fmin(seconds, poll_interval());
  for (const auto& [id, set] : sets_) seconds = std::fmin(seconds, plan_patience(*set));
  return seconds;
}

// Asked after the doorbell says "asleep".
bool Engine::work_left() {
  if (requests_waiting_.load()) return true;
  // A flag in shared memory may have changed just before the doorbell could be heard.
  return step();
}

// Whatever comes now would come through a socket or with a submission.
bool Engine::nothing_in_sight() const {
  return !requests_waiting_.load() && !mesh_->has_silent_links() && sleep_seconds() < 0;
}

// Peers that are behind in an operation that is done here need not wake anybody.
void Engine::rest_if_idle() {
  if (state_ != State::kStopped && nothing_in_sight()) doorbell_->rest();
}

// ---- the progress thread ----

void Engine::run() {
  bool drives = try_to_drive();
  double seconds = 0;
  while (true) {
    if (drives) {
      work();
      if (state_ == State::kStopped) {
        driven_ = false;
        return;
      }
      seconds = sleep_seconds();
      dozes_until_ = seconds < 0 ? kNever : now() + seconds;
      driven_ = false;
      mesh_->poller().unmute();
    } else {
      mesh_->poller().mute();
      seconds = watch_interval();
      dozes_until_ = now() + seconds;
      if ((drives = try_to_drive())) continue;
    }
    mesh_->poller().doze(seconds);
    ++counters_.wakeups;
    drives = try_to_drive();
    if (drives) mesh_->look();
  }
}

// As long as there is something to do; the doorbell says "asleep" then.
void Engine::work() {
  int idle_spins = 0;
  while (state_ != State::kStopped) {
    if (guarded_step()) {
      idle_spins = 0;
      if (spin_budget_.waiting()) spin_budget_.found(now());
      continue;
    }
    guarded([this] {
      watch();
      return true;
    });
    // Only a running collective is worth spinning for: its next flag or frame is on its way.
    bool running = false;
    for (const auto& [id, set] : sets_) running |= set->executor.running() != nullptr;
    if (!running) {
      spin_budget_.forget();
    } else if (!crowded_ && ++idle_spins < kSpins) {
      continue;
    } else if (!crowded_ && handles_.has_sleepers() && spin_budget_.spin(now())) {
      pause();
      continue;
    }
    idle_spins = 0;
    doorbell_->prepare_sleep();
    if (!guarded([this] { return work_left(); })) {
      rest_if_idle();
      return;
    }
    doorbell_->finish_sleep();
  }
}

// ---- callers ----

Status Engine::wait(hp_handle handle, double timeout) {
  HandleTable::Wait wait(handles_, handle);
  wait_for(wait, timeout);
  return wait.status();
}

Status Engine::perform(const OperationPtr& operation, double timeout) {
  if (!try_to_drive()) {
    submit(operation);
    return wait(operation->handle, timeout);
  }
  try {
    mark_ready({&operation, 1});
    std::lock_guard lock(mutex_);
    admit(operation);
    requests_waiting_.store(true);
  } catch (...) {
    leave();
    throw;
  }
  HandleTable::Wait wait(handles_, operation->handle);
  drive(wait, timeout);
  return wait.status();
}

void Engine::wait_for(HandleTable::Wait& wait, double timeout) {
  if (wait.done()) return;
  if (timeout != 0 && try_to_drive()) {
    drive(wait, timeout);
    return;
  }
  announce();
  wait.sleep(timeout);
}

// Works until the operation is done or `timeout` seconds have passed, and leaves then.
void Engine::drive(HandleTable::Wait& wait, double timeout) {
  double time = now();
  const double deadline = timeout < 0 ? kNever : time + timeout;
  const std::uint64_t bytes = mesh_->bytes_moved();
  Poller& poller = mesh_->poller();
  if (socket_traffic_ && !poller.muted()) poller.mute();
  spin_budget_.forget();
  if (wait.again()) spin_budget_.skip(time);  // in the first of the slices that it waits in
  while (!wait.done() && state_ != State::kStopped) {
    const bool busy = guarded_step();
    if (wait.done()) break;
    time = now();
    if (time >= deadline) break;
    if (busy) {
      spin_budget_.found(time);
      continue;
    }
    if (spin_budget_.spin(time)) {
      if (crowded_) {
        ::sched_yield();
      } else {
        pause();
      }
    } else if (time - quiet_since_ < kYields && must_poll()) {
      // Nobody wakes who sleeps now. Whoever else needs the processor gets it.
      ::sched_yield();
    } else {
      guarded([&] {
        watch();
        if (!poller.muted()) poller.mute();
        double seconds = sleep_seconds();
        if (deadline != kNever) {
          seconds = seconds < 0 ? deadline - time : std::fmin(seconds, deadline - time);
        }
        if (mesh_->sleep(seconds, [&] { return work_left() || wait.done(); })) ++counters_.wakeups;
        return true;
      });
    }
  }
  if (wait.done() && spin_budget_.waiting()) spin_budget_.found(now());
  socket_traffic_ = mesh_->bytes_moved() != bytes;
  leave();
}

// Hands over to the progress thread what is left to do.
void Engine::leave() {
  doorbell_->prepare_sleep();
  int steps = 0;
  while (state_ != State::kStopped && !nothing_in_sight() && steps < kLastSteps &&
         guarded([this] { return step(); })) {
    ++steps;
  }
  rest_if_idle();
  const bool at_once = state_ == State::kStopped || steps == kLastSteps;
  let_go(at_once ? 0 : sleep_seconds());
}

}  // namespace horoplug
