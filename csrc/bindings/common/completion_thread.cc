#include "completion_thread.h"

#include <thread>
#include <utility>

#include "per_process.h"

namespace horoplug::bindings {

void CompletionThread::start() {
  std::lock_guard lock(mutex_);
  if (started_) return;
  // Detached: it runs until the process ends.
  std::thread([this] { run_callbacks(); }).detach();
  started_ = true;
}

void CompletionThread::post(Callback* callback) noexcept {
  {
    std::lock_guard lock(mutex_);
    (last_ == nullptr ? first_ : last_->next_) = callback;
    last_ = callback;
  }
  posted_.notify_one();
}

void CompletionThread::run_callbacks() {
  std::unique_lock lock(mutex_);
  for (;;) {
    posted_.wait(lock, [this] { return first_ != nullptr; });
    Callback* callbacks = std::exchange(first_, nullptr);
    last_ = nullptr;
    lock.unlock();
    while (callbacks != nullptr) std::exchange(callbacks, callbacks->next_)->run();
    lock.lock();
  }
}

CompletionThread& completion_thread() { return per_process<CompletionThread>(); }

}  // namespace horoplug::bindings
