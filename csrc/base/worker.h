// A thread that runs functions one after the other.
//
// It serves libraries that want all their calls from one thread. If a call into such a library
// never returns, the destructor leaves the thread behind instead of waiting for it.
#pragma once

#include <functional>
#include <memory>

#include "base/time.h"

namespace horoplug {

class Worker {
 public:
  using Function = std::function<void()>;  // must not throw

  Worker();
  // Runs the functions that were posted before. Waits for them for a short time only.
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // May be called by any thread, this one included. Returns at once.
  void post(Function function);
  // Returns true once the function, and every function that was posted before it, has run; false if
  // that takes longer than `time`. Runs the function directly if the caller is the worker's own
  // thread.
  bool run(Function function, Seconds time);

  struct State;

 private:
  std::shared_ptr<State> state_;
};

}  // namespace horoplug
