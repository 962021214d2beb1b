// Checks everything that may take too long: the start, transfers, GPUs, plans, and operations that
// some ranks do not submit. Used by the thread that runs the loop.
#pragma once

#include "engine/handshake.h"
#include "engine/lifecycle.h"
#include "engine/watchdog/liveness.h"
#include "engine/watchdog/peer_wakeups.h"
#include "engine/watchdog/plan_deadlines.h"
#include "engine/watchdog/stall_inspector.h"
#include "engine/watchdog/transfer_deadlines.h"

namespace horoplug {

class Watchdog {
 public:
  Watchdog(const Lifecycle& lifecycle, Handshake& handshake, TransferDeadlines& transfers,
           StallInspector& stalls, Liveness& liveness, PeerWakeUps& wakeups, PlanDeadlines& plans,
           SteadyTime now)
      : lifecycle_(lifecycle),
        handshake_(handshake),
        transfers_(transfers),
        stalls_(stalls),
        liveness_(liveness),
        wakeups_(wakeups),
        plans_(plans),
        last_watch_(now) {}

  // Throws Error(HP_TIMEOUT) if the job has to be given up. While something may be late, an
  // interval between two calls that is much longer than interval() was lost.
  void watch(SteadyTime now);
  // How often watch() has to be called while something may be late.
  Seconds interval() const;

 private:
  void excuse(const LostTime& lost);

  const Lifecycle& lifecycle_;
  Handshake& handshake_;
  TransferDeadlines& transfers_;
  StallInspector& stalls_;
  Liveness& liveness_;
  PeerWakeUps& wakeups_;
  PlanDeadlines& plans_;
  SteadyTime last_watch_;
};

}  // namespace horoplug
