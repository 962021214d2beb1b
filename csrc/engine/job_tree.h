// This rank in the tree of all ranks of the job.
#pragma once

#include <vector>

#include "controller/state/topology.h"
#include "engine/options.h"

namespace horoplug {

inline TreePosition position_in_job(const EngineConfig& config) {
  std::vector<int> hosts;
  for (const Member& member : config.members) hosts.push_back(member.host);
  return Topology(hosts).position(config.rank);
}

}  // namespace horoplug
