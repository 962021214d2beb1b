// The threads of the program that submit operations: which of them could still submit what other
// ranks wait for.
//
// The owner's lock protects all but begin_wait() and end_wait(), which a thread calls for itself.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

namespace horoplug {

class CallerThreads {
 public:
  // Callers that handle signals wait in slices; for so many seconds after a slice they still count
  // as blocked.
  static constexpr double kBetweenWaits = 1.0;

  class Thread {
   public:
    // A caller that waits in slices says after the first one which other threads it expects to
    // submit. Until then it counts as one that may submit itself.
    void begin_wait(bool is_first_slice) {
      state_.store(is_first_slice ? kFirstSlice : kBlocked, std::memory_order_relaxed);
    }
    void end_wait() { state_.store(kOutside, std::memory_order_relaxed); }
    // Its next slice follows.
    void end_slice(double now) {
      if (state_.load(std::memory_order_relaxed) == kFirstSlice) return;
      state_.store(now, std::memory_order_relaxed);
    }

   private:
    friend class CallerThreads;
    static constexpr double kOutside = -1, kFirstSlice = -2, kBlocked = -3;

    bool is_blocked(double now) const;
    bool may_submit() const {
      return submits_ || state_.load(std::memory_order_relaxed) == kFirstSlice;
    }

    bool submits_ = false;  // it has submitted operations, and may submit others
    std::vector<std::int64_t> expected_;
    std::atomic<double> state_{kOutside};  // 0 or more: when a slice that was not the first ended
  };

  // The calling thread. The reference is valid while the thread runs.
  Thread& current();
  // The calling thread submits an operation, and may submit others.
  void note_submission() { current().submits_ = true; }
  // While the calling thread waits, these threads, by their ids in the kernel, may submit although
  // they have not done so yet. The list replaces the former one of this thread.
  void expect(std::vector<std::int64_t> ids) { current().expected_ = std::move(ids); }

  // The number of threads that may submit operations, run and are not blocked in a wait.
  int busy(double now) const;

  // For tests: the number of threads for which something is kept, of which some may have ended.
  std::size_t size() const { return threads_.size(); }

 private:
  void forget_ended();

  std::unordered_map<pid_t, Thread> threads_;
  std::size_t forget_at_ = 16;  // the size of threads_ at which those that have ended are removed
  pid_t last_ = 0;              // the last thread that has called current(), and its entry
  Thread* last_thread_ = nullptr;
};

}  // namespace horoplug
