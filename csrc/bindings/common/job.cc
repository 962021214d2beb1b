#include "job.h"

#include <pthread.h>

#include <thread>

namespace horoplug::bindings {

void Job::set(const JobInfo& info) {
  std::unique_lock lock(mutex_);
  info_ = info;
  if (info.engine == nullptr) given_back_.wait(lock, [this] { return loans_ == 0; });
}

Job::Loan Job::borrow() {
  std::lock_guard lock(mutex_);
  if (info_.engine == nullptr) return {};
  ++loans_;
  return {this, info_};
}

void Job::Loan::give_back() {
  if (job_ == nullptr) return;
  Job& job = *std::exchange(job_, nullptr);
  std::lock_guard lock(job.mutex_);
  if (--job.loans_ == 0) job.given_back_.notify_all();
}

void Job::start_thread() {
  std::lock_guard lock(tasks_mutex_);
  if (has_thread_) return;
  // It is left running when the process ends.
  std::thread([this] { run_tasks(); }).detach();
  has_thread_ = true;
}

void Job::post(Task* task) noexcept {
  {
    std::lock_guard lock(tasks_mutex_);
    (last_ == nullptr ? first_ : last_->next_) = task;
    last_ = task;
  }
  task_arrived_.notify_one();
}

void Job::run_tasks() {
  std::unique_lock lock(tasks_mutex_);
  for (;;) {
    task_arrived_.wait(lock, [this] { return first_ != nullptr; });
    Task* tasks = std::exchange(first_, nullptr);
    last_ = nullptr;
    lock.unlock();
    while (tasks != nullptr) std::exchange(tasks, tasks->next_)->run();
    lock.lock();
  }
}

namespace {

// Never destroyed: its thread uses it to the very end of the process.
Job* current = nullptr;

}  // namespace

Job& job() {
  static const bool started = [] {
    current = new Job;
    // The parent's thread does not exist in a child, and its locks may be held for ever.
    ::pthread_atfork(nullptr, nullptr, [] { current = new Job; });
    return true;
  }();
  static_cast<void>(started);
  return *current;
}

}  // namespace horoplug::bindings
