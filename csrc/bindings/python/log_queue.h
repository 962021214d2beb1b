// Carries log messages from the engine's threads to a Python callable.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace horoplug::python {

// The engine may log from any thread and under its own locks, also while a Python thread that holds
// the GIL waits for one of them. So write() never takes the GIL: a thread of the queue's own calls
// Python. Once closed, or when Python is too slow to follow, messages go to stderr.
class LogQueue {
 public:
  // Runs on the queue's thread and takes the GIL itself; must not throw.
  using Deliver = std::function<void(std::int32_t level, const char* text)>;

  explicit LogQueue(Deliver deliver);
  // Closes the queue.
  ~LogQueue();
  LogQueue(const LogQueue&) = delete;
  LogQueue& operator=(const LogQueue&) = delete;

  void write(std::int32_t level, const char* text);

  // Delivers what is queued and ends the thread. The caller must not hold the GIL. Idempotent.
  void close();

  // Closes every queue there is: for interpreter exit, after which a thread that asks for the GIL
  // never returns.
  static void close_all();

  struct State;

 private:
  std::shared_ptr<State> state_;
};

}  // namespace horoplug::python
