// The threads of the program that submit operations: which of them could still submit what other
// ranks wait for.
//
// The owner's lock protects all but end_wait() and end_slice(), which a thread calls for itself.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/operations/sleeping_thread.h"
#include "horoplug/horoplug.h"

namespace horoplug {

class CallerThreads {
 public:
  // Callers that handle signals wait in slices; for so long after a slice they still count
  // as blocked. The same is true of what is seen of waits outside of the core.
  static constexpr Seconds kBetweenWaits{1};
  // How long a thread must have polled an operation before the operation counts as one that it
  // waits for.
  static constexpr Seconds kPollsAtLeast{0.2};

  class Thread {
   public:
    // For an operation. A caller that waits in slices says after one of the first which other
    // threads it expects to submit. Until then it counts as one that may submit itself.
    void begin_wait(hp_handle handle, bool is_slice) {
      waits_for_ = handle;
      const bool is_known = !is_slice || expected_for_ == handle;
      set(is_known ? Phase::kBlocked : Phase::kExpectsUnknown);
    }
    void end_wait() { set(Phase::kOutside); }
    // Its next slice follows.
    void end_slice(SteadyTime now) {
      if (is(Phase::kExpectsUnknown)) return;
      slice_ended_.store(now, std::memory_order_relaxed);
      set(Phase::kBetweenSlices);
    }
    // The thread has asked whether an operation is done, which it is not. Returns whether it has
    // done so for kPollsAtLeast.
    bool note_poll(SteadyTime now);

   private:
    friend class CallerThreads;
    enum class Phase { kOutside, kExpectsUnknown, kBlocked, kBetweenSlices };  // of its wait

    void set(Phase phase) { phase_.store(phase, std::memory_order_release); }
    bool is(Phase phase) const { return phase_.load(std::memory_order_acquire) == phase; }
    bool is_blocked(SteadyTime now, Seconds least) const;
    bool waits_in_core(SteadyTime now) const;
    bool only_polls(SteadyTime now, Seconds least) const;
    bool may_submit() const { return submits_ || is(Phase::kExpectsUnknown); }

    pid_t id_ = 0;
    bool submits_ = false;  // it has submitted operations, and may submit others
    std::vector<std::int64_t> expected_;
    std::vector<std::int64_t> held_;  // the threads that cannot continue before it does
    hp_handle waits_for_ = 0;         // the operation of its last wait
    hp_handle expected_for_ = 0;      // the operation in whose wait it has set expected_
    std::atomic<Phase> phase_{Phase::kOutside};
    std::atomic<SteadyTime> slice_ended_{kLongAgo};
    // Waits outside of the core: as the thread itself has said, and as others have seen.
    SteadyTime said_at_ = kLongAgo;
    SleepingThread sleep_;
    // Polls, each within kBetweenWaits after the one before.
    SteadyTime polls_since_, polled_at_ = kLongAgo;
    std::int64_t polls_ = 0, cpu_time_before_ = 0;
  };

  // What is known of a thread at one moment.
  struct State {
    pid_t id;
    bool blocked;
    bool may_submit;                     // unless it is blocked
    std::vector<std::int64_t> expected;  // of a blocked thread: others that may submit
    std::vector<std::int64_t> held;      // of a blocked thread: others that are blocked with it
  };

  // The calling thread. The reference is valid while the thread runs.
  Thread& current();
  // The calling thread submits an operation, and may submit others.
  void note_submission() {
    Thread& thread = current();
    thread.submits_ = true;
    thread.said_at_ = thread.polled_at_ = kLongAgo;
  }
  // While the calling thread waits, these threads, by their ids in the kernel, may submit although
  // they have not done so yet. The list replaces the former one of this thread.
  void expect(std::vector<std::int64_t> ids) {
    Thread& thread = current();
    thread.expected_ = std::move(ids);
    thread.expected_for_ = thread.waits_for_;
  }
  // These threads cannot continue before the calling thread, which waits, does.
  void hold(std::vector<std::int64_t> ids) { current().held_ = std::move(ids); }
  // The calling thread waits outside of the core, or it has seen that another one does.
  void note_wait(SteadyTime now) { current().said_at_ = now; }
  void note_wait(pid_t id, const SleepingThread::Look& look, SteadyTime now);

  // `least`: how long a thread must have waited outside of the core to count as blocked.
  std::vector<State> states(SteadyTime now, Seconds least) const;
  // The number of threads that may submit operations, run and are not blocked in a wait. A thread
  // is blocked if it is according to one of the lists.
  static int busy(std::span<const std::vector<State>> lists);
  int busy(SteadyTime now, Seconds least = {}) const {
    const std::vector<State> list = states(now, least);
    return busy({&list, 1});
  }

  // For tests: the number of threads for which something is kept, of which some may have ended.
  std::size_t size() const { return threads_.size(); }

 private:
  Thread& entry(pid_t id) {
    Thread& thread = threads_[id];
    thread.id_ = id;
    return thread;
  }
  void forget_ended();

  std::unordered_map<pid_t, Thread> threads_;
  std::size_t forget_at_ = 16;  // the size of threads_ at which those that have ended are removed
  pid_t last_ = 0;              // the last thread that has called current(), and its entry
  Thread* last_thread_ = nullptr;
};

}  // namespace horoplug
