// Whether a thread of the program sleeps until another thread of the process wakes it up, as one
// does that waits for the result of an operation outside of the core.
#pragma once

#include <sys/types.h>

#include <cstdint>

#include "base/time.h"

namespace horoplug {

// CPU time of a thread of this process, in nanoseconds; -1 if it has ended.
std::int64_t cpu_time_of(pid_t thread);
// The same of all threads of this process together.
std::int64_t cpu_time_of_process();

class SleepingThread {
 public:
  // What is seen of a thread at one moment.
  struct Look {
    bool sleeps = false;  // without a limit, and only a thread of this process can wake it up
    std::int64_t cpu_time = 0;
    std::int64_t process_cpu_time = 0;
  };
  static Look look_at(pid_t thread);

  // Looks follow each other as long as the caller believes that the thread waits.
  void note(const Look& look, SteadyTime now);
  // Whether the last look is younger than `most_age`, and the thread has not run at all in
  // the time `least` before it, in which the process computed practically nothing: no other
  // thread was at work that could wake it up.
  bool has_slept(SteadyTime now, Seconds least, Seconds most_age) const;

 private:
  SteadyTime noted_at_ = kLongAgo;
  SteadyTime since_ = kNever;
  Look first_;
};

}  // namespace horoplug
