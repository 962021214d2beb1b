#include "engine/watchdog/watchdog.h"

#include <algorithm>
#include <utility>

namespace horoplug {
namespace {

// A quarter of the shortest limit if that is less.
constexpr Seconds kLeastLostTime{1};

}  // namespace

Seconds Watchdog::interval() const { return std::min(stalls_.interval() / 4, Seconds(0.25)); }

void Watchdog::watch(SteadyTime now) {
  const LostTime lost{std::exchange(last_watch_, now) + interval(), now};
  if (lost.length() > std::min(kLeastLostTime, transfers_.patience())) excuse(lost);
  if (lifecycle_.starting()) return handshake_.check_deadline(now);
  transfers_.check_transfers(now);
  transfers_.check_gpus(now);
  wakeups_.send_if_due(now);
  plans_.check(now);
  stalls_.check(now);
}

// This process was stopped, or starved of its processor. It must not hold the lost time against its
// peers. An idle engine sleeps for as long, but waits for nothing meanwhile: what it waits for next
// begins at the end of the sleep, and so keeps its whole limit and no more.
void Watchdog::excuse(const LostTime& lost) {
  liveness_.excuse(lost);
  transfers_.excuse(lost);
  stalls_.excuse(lost);
  if (lifecycle_.starting()) handshake_.excuse(lost);
}

}  // namespace horoplug
