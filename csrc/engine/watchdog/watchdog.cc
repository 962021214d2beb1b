#include "engine/watchdog/watchdog.h"

#include <algorithm>

#include "controller/messages/messages.h"

namespace horoplug {
namespace {

// How late the loop may be without having been stopped, unless a limit is short.
constexpr Seconds kTolerance{1};

}  // namespace

Seconds Watchdog::interval() const { return std::min(stalls_.interval() / 4, Seconds(0.25)); }

// The loop reads the clock at least as often as it watches. What is late by more than this was not
// due to other work: the process was stopped, or starved of its processor.
void Watchdog::begin_interval() {
  const Seconds limit = progress_limit(config_.options).time;
  clock_.expect_readings(interval(), std::min(kTolerance, Suspicion::patience(limit)));
}

void Watchdog::watch(RunningTime now) {
  begin_interval();
  if (lifecycle_.starting()) return handshake_.check_deadline(now);
  transfers_.check_transfers(now);
  transfers_.check_gpus(now);
  wakeups_.send_if_due(now);
  plans_.check(now);
  stalls_.check(now);
  for (const int rank : suspicion_.take_pings())
    mesh_.send_control(rank, encode(MessageKind::kPing));
}

}  // namespace horoplug
