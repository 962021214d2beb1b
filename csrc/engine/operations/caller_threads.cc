#include "engine/operations/caller_threads.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <set>

namespace horoplug {
namespace {

// A system call once per thread.
pid_t own_id() {
  thread_local const auto id = static_cast<pid_t>(::syscall(SYS_gettid));
  return id;
}

// The id may belong to another thread by now, which then counts in place of the one that has ended:
// a deadlock may be reported as a possible one for that reason, but not the reverse.
bool runs(pid_t id) { return ::syscall(SYS_tgkill, ::getpid(), id, 0) == 0 || errno != ESRCH; }

// CPU time for each poll of a thread that does nothing else: a few calls of an interpreter. A
// program that polls between two parts of its computation takes longer.
constexpr std::int64_t kMostForPoll = 1'000'000;  // nanoseconds

}  // namespace

CallerThreads::Thread& CallerThreads::current() {
  const pid_t id = own_id();
  if (id == last_) return *last_thread_;
  if (threads_.size() >= forget_at_ && !threads_.contains(id)) forget_ended();
  last_ = id;
  last_thread_ = &entry(id);
  return *last_thread_;
}

// Called when the number of entries has doubled, so that a new thread costs a constant number of
// system calls on average.
void CallerThreads::forget_ended() {
  std::erase_if(threads_, [](const auto& entry) { return !runs(entry.first); });
  forget_at_ = 2 * threads_.size() + 16;
}

void CallerThreads::note_wait(pid_t id, const SleepingThread::Look& look, SteadyTime now) {
  entry(id).sleep_.note(look, now);
}

bool CallerThreads::Thread::note_poll(SteadyTime now) {
  if (now - polled_at_ >= kBetweenWaits) {
    polls_since_ = now;
    polls_ = 0;
    cpu_time_before_ = cpu_time_of(id_);
  }
  polled_at_ = now;
  ++polls_;
  return now - polls_since_ >= kPollsAtLeast;
}

bool CallerThreads::Thread::waits_in_core(SteadyTime now) const {
  return is(Phase::kBlocked) ||
         (is(Phase::kBetweenSlices) &&
          now - slice_ended_.load(std::memory_order_relaxed) < kBetweenWaits);
}

bool CallerThreads::Thread::only_polls(SteadyTime now, Seconds least) const {
  return now - polled_at_ < kBetweenWaits && now - polls_since_ >= std::max(least, kPollsAtLeast) &&
         cpu_time_of(id_) - cpu_time_before_ <= polls_ * kMostForPoll;
}

bool CallerThreads::Thread::is_blocked(SteadyTime now, Seconds least) const {
  return waits_in_core(now) || now - said_at_ < kBetweenWaits || only_polls(now, least) ||
         sleep_.has_slept(now, least, kBetweenWaits);
}

std::vector<CallerThreads::State> CallerThreads::states(SteadyTime now, Seconds least) const {
  std::vector<State> states;
  states.reserve(threads_.size());
  for (const auto& [id, thread] : threads_) {
    State& state = states.emplace_back(id, thread.is_blocked(now, least), thread.may_submit());
    if (!state.blocked) continue;
    state.expected = thread.expected_;
    state.held = thread.held_;
  }
  return states;
}

int CallerThreads::busy(std::span<const std::vector<State>> lists) {
  std::set<pid_t> blocked;
  for (const auto& list : lists) {
    for (const State& thread : list) {
      if (!thread.blocked) continue;
      blocked.insert(thread.id);
      blocked.insert(thread.held.begin(), thread.held.end());
    }
  }
  std::set<pid_t> may_submit;
  for (const auto& list : lists) {
    for (const State& thread : list) {
      if (thread.may_submit) may_submit.insert(thread.id);
      may_submit.insert(thread.expected.begin(), thread.expected.end());
    }
  }
  return static_cast<int>(std::count_if(may_submit.begin(), may_submit.end(), [&](pid_t id) {
    return !blocked.contains(id) && runs(id);
  }));
}

}  // namespace horoplug
