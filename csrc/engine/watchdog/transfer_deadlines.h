// Limits how long a batch may make no progress, between ranks and on the GPU. Used by the thread
// that runs the loop.
//
// Progress is counted per batch: progress of another process set does not extend the limit of this
// batch. A batch makes progress when its coroutine passes a wait, when its own data moves, or when
// other data moves over the links to all ranks that it waits for, because its data may be queued
// behind that. The last rule cannot hide a stopped rank: no data moves over the links to it, so a
// rank that waits for it directly reaches the limit. The last rule does not apply while ranks may
// not have joined a plan's batch; the negotiation finds out which rank is late.
#pragma once

#include <string>
#include <vector>

#include "engine/options.h"
#include "engine/point_to_point.h"
#include "engine/process_set_registry.h"
#include "engine/rank_gpu.h"
#include "engine/watchdog/limits.h"
#include "engine/watchdog/suspicion.h"
#include "transport/mesh.h"

namespace horoplug {

class TransferDeadlines {
 public:
  TransferDeadlines(const EngineConfig& config, Mesh& mesh, const ProcessSetRegistry& registry,
                    PointToPoint& point_to_point, const RankGpu& gpu, Suspicion& suspicion)
      : config_(config),
        mesh_(mesh),
        registry_(registry),
        point_to_point_(point_to_point),
        gpu_(gpu),
        suspicion_(suspicion) {}

  // Both throw Error(HP_TIMEOUT), which names the ranks to blame, when the limit has passed.
  void check_transfers(RunningTime now);
  void check_gpus(RunningTime now);

 private:
  Seconds limit() const { return progress_limit(config_.options).time; }
  std::string limit_is_set_by() const;
  bool makes_progress(const ProcessSet& set) const;
  void check_batch(const ProcessSet& set, RunningTime now);
  void check_point_to_point(RunningTime now);
  [[noreturn]] void fail(const std::string& what, const std::string& blamed) const;
  std::vector<int> suspects(const ProcessSet& set) const;
  std::vector<int> within_reach(std::vector<int> ranks, const std::vector<int>& awaited) const;

  const EngineConfig& config_;
  Mesh& mesh_;
  const ProcessSetRegistry& registry_;
  PointToPoint& point_to_point_;
  const RankGpu& gpu_;
  Suspicion& suspicion_;
  Mesh::Movement movement_;  // since the last check
};

}  // namespace horoplug
