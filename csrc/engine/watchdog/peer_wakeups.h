// Wake-up messages to peers whose data comes over connections that have to be polled.
//
// MPI moves data only inside its own calls, also data that it has accepted already, and a rank that
// has nothing to do makes no calls. So a rank that has waited for long sends a wake-up to the peers
// that it waits for, at growing intervals, and they poll their connections once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "engine/point_to_point.h"
#include "engine/polling.h"
#include "engine/process_set_registry.h"
#include "transport/mesh.h"

namespace horoplug {

// Used by the thread that runs the loop.
class PeerWakeUps {
 public:
  PeerWakeUps(Mesh& mesh, const ProcessSetRegistry& registry, const PointToPoint& point_to_point,
              const Polling& polling, int rank)
      : mesh_(mesh),
        registry_(registry),
        point_to_point_(point_to_point),
        polling_(polling),
        rank_(rank) {}

  void send_if_due(RunningTime now);

 private:
  void wake_up(const std::vector<int>& ranks);

  Mesh& mesh_;
  const ProcessSetRegistry& registry_;
  const PointToPoint& point_to_point_;
  const Polling& polling_;
  const int rank_;
  std::map<std::uint32_t, RunningTime> last_sent_;  // for batches, by process set
  RunningTime last_sent_to_peers_;                  // for sends and recvs
  std::size_t next_ = 0;  // wake-ups so far; peers take turns if they are many
};

}  // namespace horoplug
