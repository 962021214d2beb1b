// Which ranks answer while something stands still. A rank that waits for another one that waits
// itself would otherwise blame the wrong one. Used by the thread that runs the loop.
#pragma once

#include <string>
#include <vector>

#include "transport/mesh.h"

namespace horoplug {

class Liveness {
 public:
  Liveness(Mesh& mesh, int rank) : mesh_(mesh), rank_(rank) {}

  // While something is late, a check runs: it begins with a ping to every peer.
  void update(bool late);
  // Answers to a check that is over are ignored.
  void receive_pong(int from);

  // Those of `ranks` that have not answered; none if no check runs.
  std::vector<int> silent(std::vector<int> ranks) const;
  // "rank 1, which does not answer"; empty if all peers among `ranks` answer, or no check runs.
  std::string describe_silent(std::vector<int> ranks) const;

 private:
  Mesh& mesh_;
  const int rank_;
  std::vector<bool> answered_;  // by rank; empty: no check runs
};

}  // namespace horoplug
