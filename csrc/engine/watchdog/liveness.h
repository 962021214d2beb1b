// Which ranks answer while something stands still. A rank that waits for another one that waits
// itself would otherwise blame the wrong one. Used by the thread that runs the loop.
//
// An engine answers a ping whatever its program does. Only a process that is stopped, starved or
// cut off does not.
#pragma once

#include <string>
#include <vector>

#include "base/lost_time.h"
#include "transport/mesh.h"

namespace horoplug {

class Liveness {
 public:
  Liveness(Mesh& mesh, int rank)
      : mesh_(mesh), rank_(rank), peers_(static_cast<std::size_t>(mesh.size())) {}

  // Something that `ranks` may be to blame for is late: pings them. A rank is pinged again when it
  // has answered, and `interval` has passed since the last ping.
  void ask(const std::vector<int>& ranks, SteadyTime now, Seconds interval);
  void receive_pong(int from);
  // Time that is not held against the peers.
  void excuse(const LostTime& lost);

  // Those of `ranks` that have owed an answer for `patience`.
  std::vector<int> silent(std::vector<int> ranks, SteadyTime now, Seconds patience) const;
  // "rank 1, which does not answer"; empty if there is none.
  std::string describe_silent(std::vector<int> ranks, SteadyTime now, Seconds patience) const;

 private:
  struct Peer {
    SteadyTime asked_at = kLongAgo;  // when it was pinged last
    bool owes_answer = false;
  };
  Mesh& mesh_;
  const int rank_;
  std::vector<Peer> peers_;  // by rank
};

}  // namespace horoplug
