// The start of an engine: every rank introduces itself to every rank that it is connected with,
// compares settings, and maps the memory of the ranks on its host. Used by the thread that runs the
// loop.
//
// In a job with connections on demand, a rank compares its settings with those of some ranks only.
// All ranks are connected through others, so that settings which are equal wherever two ranks are
// connected are equal on all ranks. A rank tells its parent in the tree of all ranks when its
// subtree has compared them, and the root then tells all ranks to start (kIntroduced).
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/by_rank.h"
#include "base/running_clock.h"
#include "controller/messages/messages.h"
#include "controller/state/topology.h"
#include "engine/options.h"
#include "transport/mesh.h"

namespace horoplug {

class Handshake {
 public:
  // Called once, when all ranks have introduced themselves: the shared memory of the ranks on this
  // host, this one included.
  using Done = std::function<void(std::vector<Segment> segments)>;

  // Changes `config`: the segments of its members are mapped.
  Handshake(EngineConfig& config, Mesh& mesh, Doorbell& doorbell, Done done, RunningTime now);

  // Introduces this rank.
  void begin();
  // Throws Error if the peer's settings differ, WireError if the message is invalid.
  void receive(int from, const Hello& hello);
  // Throws WireError if the message is unexpected.
  void receive_introduced(int from);
  // Throws Error(HP_TIMEOUT) if it has taken too long.
  void check_deadline(RunningTime now) const;

 private:
  void advance();
  void start();
  void finish();
  std::vector<int> awaited() const;

  EngineConfig& config_;
  Mesh& mesh_;
  Doorbell& doorbell_;
  const Done done_;
  using Settings = std::vector<std::pair<std::string, std::string>>;
  const Settings settings_;                             // of this rank
  ByRank<std::optional<std::uint64_t>> segment_bytes_;  // empty: not introduced yet
  int missing_ = 0;  // connected ranks, and this one, that are not introduced yet
  // With connections on demand; otherwise empty, without parent and children.
  TreePosition tree_;
  std::vector<int> children_;  // those whose subtrees are not introduced yet
  bool subtree_introduced_ = false;
  RunningTime started_at_;
};

}  // namespace horoplug
