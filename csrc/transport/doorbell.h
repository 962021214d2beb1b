// Wakes an engine that sleeps, and costs next to nothing while it does not.
//
// The owner says "asleep" in a shared word before it sleeps in epoll on the eventfd, and looks at
// its work once more after saying so. Whoever gives it work publishes the work first and rings
// then; only a ring that finds the owner asleep makes a system call. Between the two steps on
// either side there is a full fence (or both are sequentially consistent), so that either the owner
// sees the work or the ringer sees it asleep. Word and eventfd may be shared between processes.
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

  void ring();

  // The owner's side. prepare_sleep(); look for work; sleep on fd() if there is none;
  // finish_sleep(). Whenever fd() can be read: silence(). (A ringer may come to write there only
  // after the owner has woken for another reason.)
  void prepare_sleep() {
    word_->store(1);
    full_fence();
  }
  void finish_sleep() { word_->store(0); }
  void silence();
  int fd() const { return event_.get(); }

 private:
  Fd event_;
  Word own_word_{0};
  Word* word_ = &own_word_;
};

}  // namespace horoplug
