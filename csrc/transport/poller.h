// What an engine sleeps on: its doorbell and the sockets of its links.
//
// There are two ways to sleep. Whoever drives the engine and sleeps as its driver uses wait(). The
// progress thread, which lets others drive while it sleeps, uses doze(): an epoll around the first
// one. While somebody else drives, mute() keeps events from waking it; they are not lost, since
// unmute() looks at what has come meanwhile. kick() wakes it in any case. doze(), mute(), unmute()
// and kick() may be called by several threads at once, the rest by the driver alone.
#pragma once

#include <atomic>
#include <vector>

#include "transport/doorbell.h"
#include "transport/fd.h"

namespace horoplug {

class Poller {
 public:
  explicit Poller(Doorbell& doorbell);

  // Reports `token` whenever fd has something to read.
  void add(int fd, int token);
  // Also when it can be written to. Cheap if nothing changes.
  void want_write(int fd, int token, bool wanted);
  void remove(int fd);

  // Waits for at most `seconds` (negative: for ever) and fills in the tokens of descriptors that
  // are ready. A doorbell that was rung is silenced.
  void wait(double seconds, std::vector<int>& tokens);

  // Waits for at most `seconds` (negative: for ever) until wait() would find something, unless it
  // is muted, or until somebody kicks.
  void doze(double seconds);
  void mute();
  bool muted() const { return muted_.load(); }
  // Does nothing, and cheaply, unless somebody has muted.
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
