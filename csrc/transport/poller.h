// The file descriptors that an engine sleeps on: its doorbell and the sockets of its links.
//
// There are two ways to sleep. The thread that runs the progress loop and sleeps in it calls
// wait(). The progress thread, which lets other threads run the loop while it sleeps, calls doze():
// an epoll around the first one. While another thread runs the loop, mute() keeps events from
// waking the progress thread. No event is lost, because unmute() checks for events that arrived
// meanwhile. kick() wakes the progress thread in any case. Several threads may call doze(), mute(),
// unmute() and kick() at the same time; only the thread that runs the loop may call the other
// functions.
#pragma once

#include <atomic>
#include <vector>

#include "base/time.h"
#include "transport/doorbell.h"
#include "transport/fd.h"

namespace horoplug {

class Poller {
 public:
  explicit Poller(Doorbell& doorbell);

  // Reports `token` whenever fd is readable.
  void add(int fd, int token);
  // Also reports when fd is writable. Cheap if nothing changes.
  void want_write(int fd, int token, bool wanted);
  void remove(int fd);

  // Waits for at most `time` and returns the tokens of the descriptors that
  // are ready. Silences a doorbell that was rung.
  void wait(Seconds time, std::vector<int>& tokens);

  // Waits for at most `time` until wait() would find an event, unless
  // muted, or until kick().
  void doze(Seconds time);
  void mute();
  bool muted() const { return muted_.load(); }
  // Does nothing, cheaply, unless mute() was called.
  void unmute();
  void kick();

 private:
  Doorbell& doorbell_;
  Fd epoll_;
  std::vector<char> writing_;  // by token
  Fd outer_;                   // contains epoll_ and kick_
  Fd kick_;
  std::atomic<bool> muted_{false};
};

}  // namespace horoplug
