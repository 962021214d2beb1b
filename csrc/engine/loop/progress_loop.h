// Decides which thread runs the engine's loop, and how the other threads sleep meanwhile.
//
// One thread at a time holds the loop and does all the work of the engine: the progress thread, or
// a caller that waits for an operation. No thread ever blocks to acquire the loop. A caller that
// does not get it sleeps on the condition variable of its operation; the progress thread sleeps in
// Poller::doze(). A small operation of a caller that holds the loop therefore wakes no other
// thread: the doorbell says "awake", so that neither peers nor other threads of this process ring
// it, and the poller mutes the progress thread if sockets could wake it.
//
// Why no wake-up is lost: while nobody holds the loop, the doorbell says "asleep", and the progress
// thread is in doze() or on its way into or out of it. Two kinds of event bring it out:
//
//   - A ring of the doorbell, or data on a socket. A thread that stops running the loop first
//     declares itself asleep (Doorbell::prepare_sleep), then looks for work once more, then
//     releases the loop, and then unmutes the poller, which looks at the events that have come
//     meanwhile. The progress thread mutes the poller when it wakes up and finds the loop held. It
//     tries to acquire the loop once more after that and dozes only if this fails, too. In that
//     case another thread still holds the loop, and unmutes the poller later. An idle rank rests
//     (Doorbell::rest): submissions and sockets wake it, but flags in shared memory no longer do,
//     because they all belong to operations that this rank has finished or not begun.
//   - Time. `dozes_until_` is the time at which the progress thread wakes up at the latest. The
//     progress thread writes it before it releases the loop, or before its last attempt to acquire
//     it. A thread that stops running the loop reads it after the release, and kicks the poller if
//     something has to be looked at sooner. So either the progress thread acquires the loop, or the
//     thread that holds the loop knows until when the progress thread dozes.
//
// `held_`, `dozes_until_` and the poller's flag are sequentially consistent for this reason.
//
// A caller that sleeps on a condition variable relies on these rules: as long as its operation is
// pending, there is a time at which the progress thread looks at the work. Submissions that cannot
// change anything yet wake nobody (SubmissionQueue); a caller that waits for one of them, or polls
// it, announces it.
#pragma once

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <string>
#include <thread>

#include "base/status.h"
#include "base/time.h"
#include "engine/loop/shared_processor.h"
#include "engine/loop/spin_budget.h"
#include "transport/mesh.h"

namespace horoplug {

// Whether the calling thread may run on fewer processors than `threads`, or these have less time
// than that. `quota`: the processors' worth of time that they may use together; 0: no limit.
bool has_fewer_processors_than(int threads, double quota = 0);

// Lets the processor know that this thread spins.
void spin_pause();

// Which thread holds the loop. Any thread may call these functions.
class LoopOwnership {
 public:
  LoopOwnership(Mesh& mesh, Doorbell& doorbell) : poller_(mesh.poller()), doorbell_(doorbell) {}

  // Whether the calling thread holds the loop from now on. Never blocks.
  bool acquire();
  // The doorbell must say "asleep". If the loop has to run again within `time` (kForever: only
  // after an event), the progress thread is woken in time.
  void release(Seconds time);

  // ---- the progress thread only

  // Releases the loop before doze(time).
  void release_before_doze(Seconds time);
  // When the loop is held by another thread: mutes the poller and tries again. If this returns
  // false, doze(time) must follow.
  bool acquire_before_doze(Seconds time);
  // Sleeps until an event, a kick, or until `time` has passed.
  void doze(Seconds time) { poller_.doze(time); }
  // Releases the loop for the last time.
  void release_at_end() { held_.store(false); }

 private:
  Poller& poller_;
  Doorbell& doorbell_;
  std::atomic<bool> held_{false};
  std::atomic<SteadyTime> dozes_until_{};  // while the progress thread dozes
};

// `Work` is what the loop runs. It is a template parameter instead of an interface because a loop
// that spins calls step() millions of times per second. The thread that holds the loop calls all
// members; the progress thread calls watch_interval() also without the loop:
//
// - bool step(): does all work that is possible without waiting, and returns whether there was any.
//
// - void watch(): checks deadlines. Called when there is nothing to do, and about every
//   watch_interval() otherwise: one operation may stand still while others make progress.
//
// - void fail(const Status&): handles an exception that left one of the functions above.
//
// - bool stopped() const: there is no more work, and there will be none.
//
// - bool requests_waiting() const: another thread has announced work for step().
//
// - bool has_running_batch() const: a collective is running, so that spinning may pay.
//
// - bool has_sleeping_callers() const: a thread of the program is blocked on an operation.
//
// - bool has_callbacks() const: the program has a function called when an operation in flight ends.
//   Its threads may compute meanwhile.
//
// - bool must_poll() const: an operation may complete without an event.
//
// - SteadyTime quiet_since() const: the time of the last progress.
//
// - Seconds sleep_time() const: the time after which step() or watch() must run again without an
//   event; kForever: only after one.
//
// - Seconds watch_interval() const: the interval of watch() while another thread holds the loop, or
//   there is always something to do.
template <typename Work>
class ProgressLoop {
 public:
  // `crowded`: the ranks of this host outnumber its processors, so that spinning delays the peers.
  // `rank`: this one, for messages. `place`: its index among the `ranks` of this host.
  ProgressLoop(Work& work, Mesh& mesh, Doorbell& doorbell, bool crowded, int rank, int place = 0,
               int ranks = 1)
      : work_(work),
        mesh_(mesh),
        doorbell_(doorbell),
        ownership_(mesh, doorbell),
        crowded_(crowded),
        who_("rank " + std::to_string(rank) + ": "),
        spin_budget_(crowded ? SpinBudget::kMostYielding : SpinBudget::kMost),
        home_processor_(crowded ? home_of(place, ranks) : -1) {}
  ProgressLoop(const ProgressLoop&) = delete;
  ProgressLoop& operator=(const ProgressLoop&) = delete;

  // Starts the progress thread, which ends when the work has stopped.
  void start() {
    thread_ = std::thread([this] { run(); });
  }
  // Restricts it to one CPU; false if that is impossible.
  bool pin_to(int cpu);
  // Returns when the progress thread has ended.
  void join() {
    if (thread_.joinable()) thread_.join();
  }
  std::uint64_t wakeups() const { return wakeups_.load(std::memory_order_relaxed); }

  // ---- callers that wait for an operation

  // Whether the calling thread holds the loop from now on. Never blocks.
  bool acquire() { return ownership_.acquire(); }
  // The caller holds the loop. Runs it until `wait.done()` or until the timeout has passed, then
  // releases it.
  template <typename Wait>
  void run_until_done(Wait& wait, Seconds timeout);
  // The caller holds the loop. Finishes work that is nearly done and leaves the rest to the
  // progress thread.
  void release();

 private:
  // Steps without work after which the progress thread sleeps if nobody waits: the program needs
  // the processor for its own computation.
  static constexpr int kSpins = 50;
  // Steps that a caller makes at most before it releases the loop.
  static constexpr int kLastSteps = 4;
  // The time after the last progress during which a caller yields the processor instead of sleeping
  // when what it waits for can only be polled.
  static constexpr Seconds kYieldTime{500e-6};

  // Steps of the progress thread after which it looks at the clock if each of them did something.
  static constexpr unsigned kBusySteps = 8;

  void run();
  void run_while_busy();
  bool spin_pays();
  void watch_if_due(SteadyTime time);
  bool work_left();
  bool nothing_in_sight() const;
  void rest_if_idle();
  void rest() {
    if (!work_.stopped()) doorbell_.rest();
  }
  template <typename Done>
  void sleep(SteadyTime time, SteadyTime deadline, const Done& done);

  // Calls `body`. An exception fails the work, which counts as something done.
  template <typename Body>
  bool guarded(Body&& body);
  bool guarded_step() {
    return guarded([this] { return work_.step(); });
  }

  Work& work_;
  Mesh& mesh_;
  Doorbell& doorbell_;
  LoopOwnership ownership_;
  const bool crowded_;
  const std::string who_;
  std::atomic<std::uint64_t> wakeups_{0};
  std::thread thread_;

  // Used by the thread that holds the loop.
  SpinBudget spin_budget_;
  SharedProcessor shared_processor_;
  HomeProcessor home_processor_;
  bool socket_traffic_ = false;  // the last caller that ran the loop moved data over sockets
  SteadyTime watch_due_;         // when deadlines are checked though there is something to do
  unsigned busy_steps_ = 0;
};

// ---- implementation ----

template <typename Work>
template <typename Body>
bool ProgressLoop<Work>::guarded(Body&& body) {
  try {
    return body();
  } catch (const PeerError& error) {
    work_.fail({error.code(), "rank " + std::to_string(error.rank()) + ": " + error.what()});
  } catch (const Error& error) {
    work_.fail(error.status());
  } catch (const std::bad_alloc&) {
    work_.fail({HP_INTERNAL, who_ + "out of memory"});
  } catch (const std::exception& error) {
    work_.fail({HP_INTERNAL, who_ + "internal error: " + error.what()});
  }
  return true;
}

// The doorbell says "asleep" already: a flag in shared memory may have changed just before.
template <typename Work>
bool ProgressLoop<Work>::work_left() {
  return work_.requests_waiting() || work_.step();
}

// Whether only a socket or a submission can bring more work.
template <typename Work>
bool ProgressLoop<Work>::nothing_in_sight() const {
  return !work_.requests_waiting() && !mesh_.has_silent_work() && work_.sleep_time() == kForever;
}

// Peers that are still busy with an operation that is done here need not wake this rank.
template <typename Work>
void ProgressLoop<Work>::rest_if_idle() {
  if (nothing_in_sight()) rest();
}

template <typename Work>
void ProgressLoop<Work>::watch_if_due(SteadyTime time) {
  if (time < watch_due_ || work_.stopped()) return;
  watch_due_ = time + work_.watch_interval();
  guarded([this] {
    work_.watch();
    return true;
  });
}

// ---- the progress thread

template <typename Work>
void ProgressLoop<Work>::run() {
  bool holds = acquire();
  while (true) {
    Seconds time;
    if (holds) {
      run_while_busy();
      mesh_.ring_unread();
      if (work_.stopped()) return ownership_.release_at_end();
      time = work_.sleep_time();
      ownership_.release_before_doze(time);
    } else {
      time = work_.watch_interval();
      holds = ownership_.acquire_before_doze(time);
      if (holds) continue;
    }
    ownership_.doze(time);
    wakeups_.fetch_add(1, std::memory_order_relaxed);
    holds = acquire();
    if (holds) mesh_.look();
  }
}

// Returns when there is nothing to do, or the work has stopped. The doorbell says "asleep" then.
template <typename Work>
void ProgressLoop<Work>::run_while_busy() {
  int idle_spins = 0;
  while (!work_.stopped()) {
    if (guarded_step()) {
      idle_spins = 0;
      if (spin_budget_.waiting()) spin_budget_.found(steady_now());
      if (++busy_steps_ % kBusySteps == 0) watch_if_due(steady_now());
      continue;
    }
    guarded([this] {
      work_.watch();
      return true;
    });
    // Only a running collective is worth spinning for: its next flag or frame is on its way.
    if (!work_.has_running_batch()) {
      spin_budget_.forget();
    } else if (!crowded_ && (++idle_spins < kSpins || spin_pays())) {
      continue;
    }
    idle_spins = 0;
    doorbell_.prepare_sleep();
    if (!guarded([this] { return work_left(); })) return rest_if_idle();
    doorbell_.finish_sleep();
  }
}

// Whether the progress thread should look again instead of sleeping. It has left the processor to
// others for a moment then.
template <typename Work>
bool ProgressLoop<Work>::spin_pays() {
  const bool callers_sleep = work_.has_sleeping_callers();
  if (!callers_sleep && !work_.has_callbacks()) return false;
  if (!spin_budget_.spin(steady_now())) return false;
  if (callers_sleep) {
    spin_pause();
  } else {
    ::sched_yield();  // threads of the program that compute get this processor if they need it
  }
  return true;
}

// ---- callers

template <typename Work>
template <typename Wait>
void ProgressLoop<Work>::run_until_done(Wait& wait, Seconds timeout) {
  SteadyTime time = steady_now();
  const SteadyTime deadline = time + timeout;
  const std::uint64_t bytes = mesh_.socket_bytes();
  Poller& poller = mesh_.poller();
  if (socket_traffic_ && !poller.muted()) poller.mute();
  spin_budget_.forget();
  if (wait.again()) spin_budget_.skip(time);  // the first slice of this wait had its spin
  watch_if_due(time);
  while (!wait.done() && !work_.stopped()) {
    const bool busy = guarded_step();
    if (wait.done()) break;
    time = steady_now();
    if (time >= deadline) break;
    watch_if_due(time);
    if (busy) {
      spin_budget_.found(time);
    } else if (spin_budget_.spin(time)) {
      if (crowded_) {
        ::sched_yield();
      } else {
        spin_pause();
      }
    } else if (time - work_.quiet_since() < kYieldTime && work_.must_poll()) {
      // No event would end a sleep. Other threads get the processor if they need it.
      ::sched_yield();
    } else {
      sleep(time, deadline, [&] { return wait.done(); });
    }
  }
  if (wait.done() && spin_budget_.waiting()) spin_budget_.found(steady_now());
  socket_traffic_ = mesh_.socket_bytes() != bytes;
  const bool goes_home = crowded_ && home_processor_.ended(::sched_getcpu(), time);
  release();
  if (goes_home) go_to_processor(home_processor_.number());
}

// Sleeps as the thread that holds the loop.
template <typename Work>
template <typename Done>
void ProgressLoop<Work>::sleep(SteadyTime time, SteadyTime deadline, const Done& done) {
  guarded([&] {
    work_.watch();
    Poller& poller = mesh_.poller();
    if (!poller.muted()) poller.mute();
    const Seconds most = std::min(work_.sleep_time(), deadline - time);
    if (!mesh_.sleep(most, [&] { return work_left() || done(); })) return true;
    wakeups_.fetch_add(1, std::memory_order_relaxed);
    const int here = ::sched_getcpu();
    if (!crowded_ && shared_processor_.woken(mesh_.ringer(), here, steady_now())) {
      leave_processor(here);
      // Spinning pays now. A thread that went on sleeping would be woken on the peer's processor.
      spin_budget_.renew();
    }
    return true;
  });
}

template <typename Work>
void ProgressLoop<Work>::release() {
  doorbell_.prepare_sleep();
  // The usual case first, in which all of this is looked at once.
  if (!work_.stopped() && nothing_in_sight()) {
    rest();
    mesh_.ring_unread();
    return ownership_.release(kForever);
  }
  int steps = 0;
  while (!work_.stopped() && !nothing_in_sight() && steps < kLastSteps && guarded_step()) ++steps;
  rest_if_idle();
  mesh_.ring_unread();
  const bool at_once = work_.stopped() || steps == kLastSteps;
  ownership_.release(at_once ? Seconds::zero() : work_.sleep_time());
}

template <typename Work>
bool ProgressLoop<Work>::pin_to(int cpu) {
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  CPU_SET(static_cast<std::size_t>(cpu), &cpus);
  return ::pthread_setaffinity_np(thread_.native_handle(), sizeof cpus, &cpus) == 0;
}

}  // namespace horoplug
