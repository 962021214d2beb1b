#include "tests/simulated/stream.h"

#include <utility>

namespace horoplug::testing::simulated {

Stream::~Stream() {
  close();
  if (thread_.joinable()) thread_.join();
  delete last_;
}

void Stream::close() {
  if (std::exchange(closed_, true) || last_ == nullptr) return;
  enqueue(nullptr, nullptr);
}

void Stream::enqueue(const char* what, Work work, std::vector<Allocation*> uses) {
  for (Allocation* used : uses) used->uses.fetch_add(1, std::memory_order_relaxed);
  auto* const task = new Task{what, std::move(work), std::move(uses)};
  const std::lock_guard lock(mutex_);
  if (last_ == nullptr) {
    last_ = new Task;
    thread_ = std::thread([this, first = last_] { run(first); });
  }
  last_->next.store(task, std::memory_order_release);
  last_ = task;
  advance_to(enqueued_, size() + 1);
}

void Stream::run(Task* before) {
  const auto never = [] { return false; };
  const auto stopped = [this] { return all_.stopped.load(std::memory_order_relaxed); };
  for (std::uint32_t number = 1;; ++number) {
    wait_for(enqueued_, number, never);
    Task* const task = before->next.load(std::memory_order_acquire);
    delete std::exchange(before, task);
    if (!task->work) return advance_to(done_, number);
    for (std::uint32_t paused = 0;
         !stopped() && (paused = all_.paused.load(std::memory_order_relaxed)) % 2 == 1;) {
      wait_for(all_.paused, paused + 1, stopped);
    }
    if (!stopped()) {
      doing_.store(task->what, std::memory_order_relaxed);
      if (longest_delay_.count() > 0 && random_() % 4 == 0) {
        std::this_thread::sleep_for(longest_delay_ * (random_() % 1000) / 1000);
      }
      task->work(random_);
      doing_.store(nullptr, std::memory_order_relaxed);
    }
    task->work = nullptr;
    for (Allocation* used : task->uses) used->uses.fetch_sub(1, std::memory_order_relaxed);
    advance_to(done_, number);
  }
}

}  // namespace horoplug::testing::simulated
