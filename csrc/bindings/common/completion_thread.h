// A thread that completes operations, so that the engine's progress loop, which reports the end of
// an operation, is not blocked by what the framework does then.
#pragma once

#include <condition_variable>
#include <mutex>

namespace horoplug::bindings {

class CompletionThread {
 public:
  class Task {
   public:
    virtual ~Task() = default;
    // Called once; may delete the task.
    virtual void run() noexcept = 0;

   private:
    friend class CompletionThread;
    Task* next_ = nullptr;
  };

  // Starts the thread unless it runs. Throws std::system_error if no thread can be created.
  void start();
  // Runs a task on the thread, after those posted before. Requires start().
  void post(Task* task) noexcept;

 private:
  void run_tasks();

  std::mutex mutex_;
  std::condition_variable task_posted_;
  Task* first_ = nullptr;
  Task* last_ = nullptr;
  bool started_ = false;
};

// The one of this process. A forked child has a new one, which is not started.
CompletionThread& completion_thread();

}  // namespace horoplug::bindings
