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

}  // namespace

CallerThreads::Thread& CallerThreads::current() {
  const pid_t id = own_id();
  if (id == last_) return *last_thread_;
  if (threads_.size() >= forget_at_ && !threads_.contains(id)) forget_ended();
  last_ = id;
  last_thread_ = &threads_[id];
  return *last_thread_;
}

// Called when the number of entries has doubled, so that a new thread costs a constant number of
// system calls on average.
void CallerThreads::forget_ended() {
  std::erase_if(threads_, [](const auto& entry) { return !runs(entry.first); });
  forget_at_ = 2 * threads_.size() + 16;
}

bool CallerThreads::Thread::is_blocked(double now) const {
  const double state = state_.load(std::memory_order_relaxed);
  return state == kBlocked || (state >= 0 && now - state < kBetweenWaits);
}

int CallerThreads::busy(double now) const {
  std::set<pid_t> may_submit;
  for (const auto& [id, thread] : threads_) {
    if (!thread.is_blocked(now)) {
      if (thread.may_submit()) may_submit.insert(id);
      continue;
    }
    for (const std::int64_t expected : thread.expected_) {
      const auto known = threads_.find(static_cast<pid_t>(expected));
      if (known == threads_.end() || !known->second.is_blocked(now)) {
        may_submit.insert(static_cast<pid_t>(expected));
      }
    }
  }
  return static_cast<int>(std::count_if(may_submit.begin(), may_submit.end(), runs));
}

}  // namespace horoplug
