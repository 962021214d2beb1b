// A thread that runs what it is given, one thing after the other.
//
// It is for libraries that want all their calls from one thread. One that is never coming back from
// such a call does not hold up whoever has made the worker: it is left behind.
#pragma once

#include <functional>
#include <memory>

namespace horoplug {

class Worker {
 public:
  using Job = std::function<void()>;  // must not throw

  Worker();
  // What was posted is run before. Waits for that, but not for long.
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // May be called by any thread, this one as well, and returns at once.
  void post(Job job);
  // Returns once the job has run, and with it all that was posted before; false if it has not
  // within `seconds`. Runs it at once on this thread itself.
  bool run(Job job, double seconds);

  struct State;

 private:
  std::shared_ptr<State> state_;
};

}  // namespace horoplug
