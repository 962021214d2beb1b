// A simulated CUDA stream: a thread that runs the enqueued work in order, after random delays.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/simulated/counter.h"
#include "tests/simulated/memory.h"

namespace horoplug::testing::simulated {

// State that all streams of a machine read.
struct StreamsState {
  std::atomic<bool> stopped{false};  // the device is lost or destroyed: work is discarded
  Counter paused{0};                 // odd: streams start no further work
};

class Stream {
 public:
  using Random = std::mt19937_64;
  // Work must stop waiting once the streams have stopped.
  using Work = std::function<void(Random&)>;

  Stream(StreamsState& all, int device, unsigned number, unsigned flags, unsigned seed,
         std::chrono::microseconds longest_delay)
      : device(device),
        number(number),
        flags(flags),
        all_(all),
        random_(seed + 1000003ULL * number),
        longest_delay_(longest_delay) {}
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  const int device;
  const unsigned number, flags;
  std::atomic<int> capture_status{0};

  // `what` names the work in messages; it must be a string literal or outlive the stream. `uses`
  // are marked as used until the work is done.
  void enqueue(const char* what, Work work, std::vector<Allocation*> uses = {});
  // No further work will be enqueued: the thread ends after the enqueued work.
  void close();
  // The numbers of tasks that were enqueued and that are done.
  std::uint32_t size() const { return enqueued_.load(std::memory_order_relaxed); }
  Counter& done() { return done_; }
  // The name of the task that runs now, or nullptr.
  const char* doing() const { return doing_.load(std::memory_order_relaxed); }

 private:
  struct Task {
    const char* what = nullptr;
    Work work;
    std::vector<Allocation*> uses;
    std::atomic<Task*> next{nullptr};
  };
  void run(Task* before);

  StreamsState& all_;
  Random random_;
  std::chrono::microseconds longest_delay_;
  std::mutex mutex_;  // serialises enqueue()
  Task* last_ = nullptr;
  Counter enqueued_{0}, done_{0};
  std::atomic<const char*> doing_{nullptr};
  bool closed_ = false;
  std::thread thread_;  // started by the first task
};

}  // namespace horoplug::testing::simulated
