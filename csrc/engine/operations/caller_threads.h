// The threads of the program that submit operations: which of them could still submit what other
// ranks wait for.
//
// The owner's lock protects all but end_wait() and end_slice(), which a thread calls for itself.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "horoplug/horoplug.h"

namespace horoplug {

class CallerThreads {
 public:
  // Callers that handle signals wait in slices; for so many seconds after a slice they still count
  // as blocked.
  static constexpr double kBetweenWaits = 1.0;

  class Thread {
   public:
    // For an operation. A caller that waits in slices says after one of the first which other
    // threads it expects to submit. Until then it counts as one that may submit itself.
    void begin_wait(hp_handle handle, bool is_slice) {
      waits_for_ = handle;
      const bool is_known = !is_slice || expected_for_ == handle;
      state_.store(is_known ? kBlocked : kExpectsUnknown, std::memory_order_relaxed);
    }
    void end_wait() { state_.store(kOutside, std::memory_order_relaxed); }
    // Its next slice follows.
    void end_slice(double now) {
      if (state_.load(std::memory_order_relaxed) == kExpectsUnknown) return;
      state_.store(now, std::memory_order_relaxed);
    }

   private:
    friend class CallerThreads;
    static constexpr double kOutside = -1, kExpectsUnknown = -2, kBlocked = -3;

    bool is_blocked(double now) const;
    bool may_submit() const {
      return submits_ || state_.load(std::memory_order_relaxed) == kExpectsUnknown;
    }

    bool submits_ = false;  // it has submitted operations, and may submit others
    std::vector<std::int64_t> expected_;
    hp_handle waits_for_ = 0;              // the operation of its last wait
    hp_handle expected_for_ = 0;           // the operation in whose wait it has set expected_
    std::atomic<double> state_{kOutside};  // 0 or more: when a slice after that ended
  };

  // The calling thread. The reference is valid while the thread runs.
  Thread& current();
  // The calling thread submits an operation, and may submit others.
  void note_submission() { current().submits_ = true; }
  // While the calling thread waits, these threads, by their ids in the kernel, may submit although
  // they have not done so yet. The list replaces the former one of this thread.
  void expect(std::vector<std::int64_t> ids) {
    Thread& thread = current();
    thread.expected_ = std::move(ids);
    thread.expected_for_ = thread.waits_for_;
  }

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
