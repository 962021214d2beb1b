// The nodes whose operations have ended after HorovodStart has started them. A thread of Python
// takes them and wakes what waits in TensorFlow (horoplug/tensorflow/started.py).
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>

namespace horoplug::tensorflow {

class EndedQueues {
 public:
  // `start` is called once, by expect(): it starts the thread that takes the names.
  void on_expect(void (*start)()) { start_ = start; }

  void put(std::string queue) {
    {
      const std::lock_guard lock(mutex_);
      queues_.push_back(std::move(queue));
    }
    filled_.notify_one();
  }

  // Makes sure that somebody takes the names.
  void expect() {
    std::call_once(once_, [this] {
      if (start_ != nullptr) start_();
    });
  }

  // Waits for a name.
  std::string take() {
    std::unique_lock lock(mutex_);
    filled_.wait(lock, [this] { return !queues_.empty(); });
    std::string queue = std::move(queues_.front());
    queues_.pop_front();
    return queue;
  }

 private:
  std::once_flag once_;
  void (*start_)() = nullptr;
  std::mutex mutex_;
  std::condition_variable filled_;
  std::deque<std::string> queues_;
};

// Those of this process.
inline EndedQueues& ended_queues() {
  static auto* const queues = new EndedQueues;
  return *queues;
}

}  // namespace horoplug::tensorflow
