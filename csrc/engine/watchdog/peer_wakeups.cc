#include "engine/watchdog/peer_wakeups.h"

#include <algorithm>

#include "controller/messages/messages.h"

namespace horoplug {
namespace {

// Whether peers are to be woken for something that has stood still since `since`.
bool is_due(RunningTime now, RunningTime since, RunningTime last_sent) {
  constexpr Seconds kFirst{0.01};
  constexpr Seconds kMostApart{1};
  const Seconds last = last_sent - since;  // negative: not in this wait
  return now - since >= (last < Seconds::zero() ? kFirst : std::min(2 * last, last + kMostApart));
}

}  // namespace

// Each set has intervals of its own: it may stand still while another one makes progress.
void PeerWakeUps::send_if_due(RunningTime now) {
  if (!polling_.needed()) return;
  for (ProcessSet& set : registry_.sets()) {
    RunningTime& last_sent = last_sent_[set.number()];
    if (!is_due(now, set.last_progress(), last_sent)) continue;
    last_sent = now;
    wake_up(set.executor().blame());
  }
  const auto transfer = point_to_point_.longest_standstill();
  if (!transfer || !is_due(now, transfer->last_progress, last_sent_to_peers_)) return;
  last_sent_to_peers_ = now;
  wake_up(point_to_point_.peers());
}

void PeerWakeUps::wake_up(const std::vector<int>& ranks) {
  constexpr std::size_t kMostAtOnce = 8;  // most of a large number of peers wait, too
  for (std::size_t i = 0; i < std::min(ranks.size(), kMostAtOnce); ++i) {
    const int rank = ranks[next_++ % ranks.size()];
    if (rank != rank_) mesh_.send_control(rank, encode(MessageKind::kWakeUp));
  }
}

}  // namespace horoplug
