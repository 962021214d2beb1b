// What the progress thread sleeps on: its doorbell and the sockets of its links.
#pragma once

#include <vector>

#include "transport/doorbell.h"
#include "transport/fd.h"

namespace horoplug {

class Poller {
 public:
  explicit Poller(const Doorbell& doorbell);

  // Reports `token` whenever fd has something to read.
  void add(int fd, int token);
  // Also when it can be written to. Cheap if nothing changes.
  void want_write(int fd, int token, bool wanted);
  void remove(int fd);

  // Waits for at most `seconds` (negative: for ever) and fills in the tokens of descriptors that
  // are ready.
  void wait(double seconds, std::vector<int>& tokens);

 private:
  void control(int operation, int fd, int token, unsigned events);

  Fd epoll_;
  std::vector<char> writing_;  // by token
};

}  // namespace horoplug
