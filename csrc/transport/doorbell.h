// Wakes an engine that sleeps, and costs next to nothing while it does not.
//
// The owner says "asleep" in a shared word before it sleeps in epoll on the eventfd, and looks at
// its work once more after saying so. Whoever gives it work publishes the work first and rings
// then; only a ring that finds the owner asleep makes a system call. Between the two steps on
// either side there is a full fence (or both are sequentially consistent), so that either the owner
// sees the work or the ringer sees it asleep. Word and eventfd may be shared between processes.
//
// An owner that rests is asleep, and has nothing under way: what others do for an operation that
// they are still busy with does not concern it, and they need not wake it for that.
#pragma once

#include <atomic>
#include <cstdint>

#include "transport/fd.h"

namespace horoplug {

// No memory access before it happens after one that follows it, as all threads see them.
void full_fence();

class Doorbell {
 public:
  using Word = std::atomic<std::uint32_t>;
  static_assert(Word::is_always_lock_free);

  // A doorbell within this process.
  Doorbell();
  // One whose eventfd is `event` and whose word may move into shared memory (share_word).
  explicit Doorbell(Fd event) : event_(std::move(event)) {}

  void share_word(Word* word) { word_ = word; }

  // There is work, of whatever kind.
  void ring() { ring_if(kResting); }
  // There may be, if the owner has something under way.
  void ring_unless_resting() { ring_if(kAsleep); }

  // The owner's side. prepare_sleep(); look for work; sleep on fd() if there is none;
  // finish_sleep(). Whenever fd() can be read: silence(). (A ringer may come to write there only
  // after the owner has woken for another reason.)
  void prepare_sleep() {
    word_->store(kAsleep);
    full_fence();
  }
  void rest() { word_->store(kResting); }  // after prepare_sleep()
  void finish_sleep() { word_->store(kAwake); }
  void silence();
  int fd() const { return event_.get(); }

 private:
  static constexpr std::uint32_t kAwake = 0, kAsleep = 1, kResting = 2;

  // If the owner's sleep is no deeper than that.
  void ring_if(std::uint32_t deepest);

  Fd event_;
  Word own_word_{kAwake};
  Word* word_ = &own_word_;
};

}  // namespace horoplug
