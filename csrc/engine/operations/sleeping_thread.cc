#include "engine/operations/sleeping_thread.h"

#include <linux/futex.h>
#include <sys/syscall.h>

#include <cstdio>
#include <ctime>
#include <string>

namespace horoplug {
namespace {

// The share of one processor that a process uses which computes nothing: threads that look at
// something now and then, such as those of this library.
constexpr double kMostUse = 0.1;

std::int64_t nanoseconds(clockid_t clock) {
  timespec time{};
  if (::clock_gettime(clock, &time) != 0) return -1;
  return std::int64_t{1'000'000'000} * time.tv_sec + time.tv_nsec;
}

// Whether the thread sleeps in a futex that other processes cannot use, without a time limit: in a
// lock, a semaphore or a condition variable. A thread that sleeps for a time, or waits for a file,
// a socket or a process, continues by itself.
bool sleeps_for_a_thread(pid_t thread) {
  const std::string path = "/proc/self/task/" + std::to_string(thread) + "/syscall";
  std::FILE* const file = std::fopen(path.c_str(), "re");
  if (file == nullptr) return false;
  long call = -1;
  unsigned long address = 0, operation = 0, value = 0, limit = 1;
  // "running" in place of the numbers of a thread that runs. The kernel's numbers fit their types.
  const int read = std::fscanf(  // NOLINT(bugprone-unchecked-*)
      file, "%ld %lx %lx %lx %lx", &call, &address, &operation, &value, &limit);
  std::fclose(file);
  if (read != 5 || call != SYS_futex || limit != 0) return false;
  const unsigned long command = operation & FUTEX_CMD_MASK;
  return (operation & FUTEX_PRIVATE_FLAG) != 0 &&
         (command == FUTEX_WAIT || command == FUTEX_WAIT_BITSET);
}

}  // namespace

// The kernel's numbers of the clocks of other threads: see clock_getres(2).
std::int64_t cpu_time_of(pid_t thread) {
  return nanoseconds(static_cast<clockid_t>((~static_cast<unsigned>(thread) << 3U) | 6U));
}

std::int64_t cpu_time_of_process() { return nanoseconds(CLOCK_PROCESS_CPUTIME_ID); }

SleepingThread::Look SleepingThread::look_at(pid_t thread) {
  // If it wakes up after the first line, the next look sees that it has run.
  const std::int64_t cpu_time = cpu_time_of(thread);
  return {cpu_time >= 0 && sleeps_for_a_thread(thread), cpu_time, cpu_time_of_process()};
}

void SleepingThread::note(const Look& look, SteadyTime now) {
  noted_at_ = now;
  if (!look.sleeps) {
    since_ = kNever;
  } else if (since_ > now || look.cpu_time != first_.cpu_time) {
    since_ = now;
    first_ = look;
  }
}

bool SleepingThread::has_slept(SteadyTime now, Seconds least, Seconds most_age) const {
  if (now - noted_at_ >= most_age || noted_at_ - since_ < least) return false;
  const std::chrono::nanoseconds used(cpu_time_of_process() - first_.process_cpu_time);
  return used < kMostUse * (now - since_);
}

}  // namespace horoplug
