#include "engine/watchdog/watchdog.h"

#include <cmath>
#include <utility>

namespace horoplug {

double Watchdog::interval() const { return std::fmin(stalls_.interval() / 4, 0.25); }

void Watchdog::watch(double now) {
  const double gap = now - std::exchange(last_watch_, now);
  if (gap > 1.0) excuse(gap);
  if (lifecycle_.starting()) return handshake_.check_deadline(now);
  transfers_.check_transfers(now);
  transfers_.check_gpus(now);
  wakeups_.send_if_due(now);
  plans_.check(now);
  stalls_.check(now);
}

// This process was stopped, or starved of its processor. It must not hold the lost time against its
// peers.
void Watchdog::excuse(double seconds) {
  liveness_.excuse(seconds);
  transfers_.excuse(seconds);
  stalls_.excuse(seconds);
  if (lifecycle_.starting()) handshake_.excuse(seconds);
}

}  // namespace horoplug
