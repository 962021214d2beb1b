// The end of an engine: in agreement with its peers, or because the job has failed. Used by the
// thread that runs the loop.
#pragma once

#include "engine/completion.h"
#include "engine/counters.h"
#include "engine/lifecycle.h"
#include "engine/operations/submission_queue.h"
#include "engine/options.h"
#include "engine/peers.h"
#include "engine/point_to_point.h"
#include "engine/process_set_registry.h"
#include "engine/rank_gpu.h"
#include "engine/tracing.h"
#include "engine/watchdog/transfer_deadlines.h"
#include "transport/mesh.h"

namespace horoplug {

class Shutdown {
 public:
  // What it works on.
  struct Parts {
    const EngineConfig& config;
    Lifecycle& lifecycle;
    Mesh& mesh;
    Peers& peers;
    ProcessSetRegistry& registry;
    PointToPoint& point_to_point;
    SubmissionQueue& submissions;
    Completion& completion;
    RankGpu& gpu;
    TransferDeadlines& transfers;
    Tracing& tracing;
    Counters& counters;
  };
  explicit Shutdown(Parts parts) : parts_(parts) {}

  // The job has failed: tells the peers, ends all operations and stops.
  void fail(const Status& status);
  // Advances the shutdown of this rank as far as possible without waiting. Returns whether it did.
  bool advance(RunningTime now);

 private:
  bool is_everything_done(RunningTime now);
  void end_all_operations();
  void stop();

  const Parts parts_;
  bool waits_for_gpus_ = false;
  RunningTime since_;  // when the present phase of leaving began
};

}  // namespace horoplug
