#include "completion_thread.h"

#include <thread>
#include <utility>

#include "per_process.h"

namespace horoplug::bindings {

void CompletionThread::start() {
  std::lock_guard lock(mutex_);
  if (started_) return;
  // Detached: it runs until the process ends.
  std::thread([this] { run_tasks(); }).detach();
  started_ = true;
}

void CompletionThread::post(Task* task) noexcept {
  {
    std::lock_guard lock(mutex_);
    (last_ == nullptr ? first_ : last_->next_) = task;
    last_ = task;
  }
  task_posted_.notify_one();
}

void CompletionThread::run_tasks() {
  std::unique_lock lock(mutex_);
  for (;;) {
    task_posted_.wait(lock, [this] { return first_ != nullptr; });
    Task* tasks = std::exchange(first_, nullptr);
    last_ = nullptr;
    lock.unlock();
    while (tasks != nullptr) std::exchange(tasks, tasks->next_)->run();
    lock.lock();
  }
}

CompletionThread& completion_thread() { return per_process<CompletionThread>(); }

}  // namespace horoplug::bindings
