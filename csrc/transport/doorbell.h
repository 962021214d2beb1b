// Wakes a sleeping engine, and costs next to nothing while the engine is awake.
//
// The owner writes "asleep" to a shared word before it sleeps in epoll on the eventfd, and checks
// for work once more after that write. Another thread or rank that has work for the owner publishes
// the work first and rings afterwards. Only a ring that finds the owner asleep makes a system call.
// Each side has a full fence between its two steps (or uses sequentially consistent accesses), so
// that either the owner sees the work or the ringing side sees the owner asleep. The word and the
// eventfd may be shared between processes.
//
// An owner in the resting state is asleep and has no operation in progress. Peers need not wake it
// for the operations that they are still running.
#pragma once

#include <atomic>
#include <cstdint>

#include "transport/fd.h"

namespace horoplug {

// Prevents any memory access before the fence from being reordered after one that follows it.
void full_fence();

class Doorbell {
 public:
  using Word = std::atomic<std::uint32_t>;
  static_assert(Word::is_always_lock_free);

  // Creates a doorbell for use within this process.
  Doorbell();
  // Creates a doorbell whose eventfd is `event`. Its word may move into shared memory (share_word).
  explicit Doorbell(Fd event) : event_(std::move(event)) {}

  void share_word(Word* word) { word_ = word; }

  // Announces work of any kind.
  void ring() { ring_if(kResting); }
  // Announces work that matters only to an owner with an operation in progress.
  void ring_unless_resting() { ring_if(kAsleep); }

  // The owner's side: call prepare_sleep(), check for work, sleep on fd() if there is none, then
  // call finish_sleep(). Call silence() whenever fd() is readable. A ring may arrive at fd() after
  // the owner has woken up for another reason.
  void prepare_sleep() {
    word_->store(kAsleep);
    full_fence();
  }
  void rest() { word_->store(kResting); }  // after prepare_sleep()
  // Returns the processor of the thread that has rung since prepare_sleep(); -1: none has.
  int finish_sleep() { return static_cast<int>(word_->exchange(kAwake) >> kStateBits) - 1; }
  void silence();
  int fd() const { return event_.get(); }

 private:
  static constexpr std::uint32_t kAwake = 0, kAsleep = 1, kResting = 2;
  // Above the state: the processor of the thread that has rung, plus 1.
  static constexpr unsigned kStateBits = 2;
  static constexpr std::uint32_t kState = (1U << kStateBits) - 1;

  // Rings only if the owner's sleep state is at most this value.
  void ring_if(std::uint32_t deepest);

  Fd event_;
  Word own_word_{kAwake};
  Word* word_ = &own_word_;
};

}  // namespace horoplug
