// The process's engine, as a framework's operations find it: Python says when one has started, and
// when it is to be let go of.
//
// Operations and the thread that ends them borrow the engine. Who lets go of it waits until
// everybody has given it back, after which it may be destroyed.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <utility>

#include "horoplug/horoplug.h"

namespace horoplug::bindings {

struct JobInfo {
  hp_engine* engine = nullptr;
  std::int32_t rank = 0;
  std::int32_t local_rank = 0;
  std::int32_t local_size = 0;
};

class Job {
 public:
  // The engine from now on. With a null pointer: waits until nobody uses the last one any more.
  void set(const JobInfo& info);

  // An engine on loan.
  class Loan {
   public:
    Loan() = default;
    Loan(Job* job, const JobInfo& info) : job_(job), info_(info) {}
    ~Loan() { give_back(); }
    Loan(Loan&& other) noexcept : job_(std::exchange(other.job_, nullptr)), info_(other.info_) {}
    Loan& operator=(Loan&& other) noexcept {
      std::swap(job_, other.job_);
      std::swap(info_, other.info_);
      return *this;
    }

    explicit operator bool() const { return job_ != nullptr; }
    const JobInfo* operator->() const { return &info_; }
    void give_back();

   private:
    Job* job_ = nullptr;
    JobInfo info_;
  };
  // Empty if there is no engine.
  Loan borrow();

  // Something to do on the thread that ends operations.
  class Task {
   public:
    virtual ~Task() = default;
    // Called once; may delete the task.
    virtual void run() noexcept = 0;

   private:
    friend class Job;
    Task* next_ = nullptr;
  };
  // Has that thread start, if it has not. Throws std::system_error if there can be no more threads.
  void start_thread();
  // Runs a task there, in order: the engine, which calls from a thread that it needs, is not held
  // up by what the framework does then. After start_thread().
  void post(Task* task) noexcept;

 private:
  void run_tasks();

  std::mutex mutex_;
  std::condition_variable given_back_;
  JobInfo info_;
  int loans_ = 0;

  std::mutex tasks_mutex_;
  std::condition_variable task_arrived_;
  Task* first_ = nullptr;
  Task* last_ = nullptr;
  bool has_thread_ = false;
};

// The process's one. A forked child has a new one, without an engine.
Job& job();

}  // namespace horoplug::bindings
