// A thread that completes operations, so that the engine's progress loop, which reports the end of
// an operation, is not blocked by what the framework does then.
#pragma once

#include <condition_variable>
#include <mutex>

namespace horoplug::bindings {

class CompletionThread {
 public:
  class Callback {
   public:
    virtual ~Callback() = default;
    // Called once; may delete the callback.
    virtual void run() noexcept = 0;

   private:
    friend class CompletionThread;
    Callback* next_ = nullptr;
  };

  // Starts the thread unless it runs. Throws std::system_error if no thread can be created.
  void start();
  // Runs a callback on the thread, after callbacks posted before. Requires start().
  void post(Callback* callback) noexcept;

 private:
  void run_callbacks();

  std::mutex mutex_;
  std::condition_variable posted_;
  Callback* first_ = nullptr;
  Callback* last_ = nullptr;
  bool started_ = false;
};

// The one of this process. A forked child has a new one, which is not started.
CompletionThread& completion_thread();

}  // namespace horoplug::bindings
