// A simulated stream: a thread that does what was put into it, in order, after random delays.
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

// What all streams of a GPU ask.
struct StreamsState {
  std::atomic<bool> stopped{false};  // what is waited for will not come
  Counter paused{0};                 // odd: nothing more is begun
};

class Stream {
 public:
  using Random = std::mt19937_64;
  // What is done; it gives up waiting when the streams have stopped.
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

  // `what`: for messages, a literal. The memory is that which it uses, until it is done.
  void enqueue(const char* what, Work work, std::vector<Allocation*> uses = {});
  // Nothing more will be put in: the thread ends when it has done what there is.
  void close();
  // How many have been put in, and how many of these are done.
  std::uint32_t size() const { return enqueued_.load(std::memory_order_relaxed); }
  Counter& done() { return done_; }
  // What it does now; nullptr: nothing.
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
  std::mutex mutex_;  // of those who put something in
  Task* last_ = nullptr;
  Counter enqueued_{0}, done_{0};
  std::atomic<const char*> doing_{nullptr};
  bool closed_ = false;
  std::thread thread_;  // from the first task on
};

}  // namespace horoplug::testing::simulated
