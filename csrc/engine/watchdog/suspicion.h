// Which ranks are to blame for a wait that takes too long. A rank that waits for another one that
// waits itself would otherwise blame the wrong one.
//
// At half of a limit, the ranks that may be to blame are pinged: each again a quarter of the limit
// after the last ping, if it has answered. A rank that owes an answer for a quarter of the limit is
// silent. An engine answers a ping whatever its program does. Only a process that is stopped,
// starved or cut off does not.
//
// A state machine without I/O and without a clock. Used by the thread that runs the loop.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/running_clock.h"

namespace horoplug {

class Suspicion {
 public:
  Suspicion(int rank, int size) : rank_(rank), peers_(static_cast<std::size_t>(size)) {}

  // Whether a wait that has lasted this long must be examined.
  static bool arises(Seconds waited, Seconds limit) { return waited >= limit / 2; }
  // How long a rank may owe the answer to a ping.
  static Seconds patience(Seconds limit) { return limit / 4; }

  struct Finding {
    bool is_late;             // the limit has passed
    std::vector<int> silent;  // those of the ranks in question that are silent
    // "rank 1, which does not answer"; empty if no rank is silent.
    std::string describe_silent() const;
    // The same, or these ranks if no rank is silent.
    std::string blame(const std::vector<int>& ranks) const;
  };
  // `ranks` may be to blame for a wait.
  Finding examine(const std::vector<int>& ranks, Seconds waited, Seconds limit, RunningTime now);

  // The ranks that must be pinged since the last call.
  std::vector<int> take_pings() { return std::exchange(pings_, {}); }
  // A rank has answered a ping.
  void receive_pong(int from) { peers_[static_cast<std::size_t>(from)].owes_answer = false; }

 private:
  struct Peer {
    std::optional<RunningTime> pinged_at;
    bool owes_answer = false;
  };
  const int rank_;
  std::vector<Peer> peers_;  // by rank
  std::vector<int> pings_;
};

}  // namespace horoplug
