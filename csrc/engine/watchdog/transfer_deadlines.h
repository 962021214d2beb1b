// Limits how long a batch may make no progress, between ranks and on the GPU. Used by the thread
// that runs the loop.
#pragma once

#include <cstdint>
#include <string>

#include "engine/gpu_queue.h"
#include "engine/options.h"
#include "engine/point_to_point.h"
#include "engine/process_set_registry.h"
#include "engine/watchdog/liveness.h"
#include "transport/mesh.h"

namespace horoplug {

class TransferDeadlines {
 public:
  TransferDeadlines(const EngineConfig& config, const Mesh& mesh,
                    const ProcessSetRegistry& registry, PointToPoint& point_to_point,
                    const GpuQueue& gpu, const Liveness& liveness)
      : config_(config),
        mesh_(mesh),
        registry_(registry),
        point_to_point_(point_to_point),
        gpu_(gpu),
        liveness_(liveness) {}

  // Both throw Error(HP_TIMEOUT), which names the ranks to blame, when the limit has passed, and
  // return whether half of it has.
  bool check_transfers(double now);
  bool check_gpus(double now);
  // This process has stood still for `seconds`, which are not held against the peers.
  void excuse(double seconds);

 private:
  bool check_point_to_point(double now, bool moved) const;
  std::string blame(const ProcessSet& set) const;

  const EngineConfig& config_;
  const Mesh& mesh_;
  const ProcessSetRegistry& registry_;
  PointToPoint& point_to_point_;
  const GpuQueue& gpu_;
  const Liveness& liveness_;
  std::uint64_t last_data_moved_ = 0;
};

}  // namespace horoplug
