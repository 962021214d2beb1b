// Checks everything that may take too long: the start, transfers, GPUs, plans, and operations that
// some ranks do not submit. Used by the thread that runs the loop.
#pragma once

#include "engine/handshake.h"
#include "engine/lifecycle.h"
#include "engine/watchdog/peer_wakeups.h"
#include "engine/watchdog/plan_deadlines.h"
#include "engine/watchdog/stall_inspector.h"
#include "engine/watchdog/suspicion.h"
#include "engine/watchdog/transfer_deadlines.h"

namespace horoplug {

class Watchdog {
 public:
  Watchdog(const EngineConfig& config, const Lifecycle& lifecycle, Mesh& mesh, RunningClock& clock,
           const Handshake& handshake, TransferDeadlines& transfers, StallInspector& stalls,
           Suspicion& suspicion, PeerWakeUps& wakeups, PlanDeadlines& plans)
      : config_(config),
        lifecycle_(lifecycle),
        mesh_(mesh),
        clock_(clock),
        handshake_(handshake),
        transfers_(transfers),
        stalls_(stalls),
        suspicion_(suspicion),
        wakeups_(wakeups),
        plans_(plans) {
    begin_interval();
  }

  // Throws Error(HP_TIMEOUT) if the job has to be given up.
  void watch(RunningTime now);
  // How often watch() has to be called while something may be late.
  Seconds interval() const;

 private:
  void begin_interval();

  const EngineConfig& config_;
  const Lifecycle& lifecycle_;
  Mesh& mesh_;
  RunningClock& clock_;
  const Handshake& handshake_;
  TransferDeadlines& transfers_;
  StallInspector& stalls_;
  Suspicion& suspicion_;
  PeerWakeUps& wakeups_;
  PlanDeadlines& plans_;
};

}  // namespace horoplug
