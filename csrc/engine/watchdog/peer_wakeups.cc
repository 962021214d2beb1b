#include "engine/watchdog/peer_wakeups.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "controller/messages.h"

namespace horoplug {

void PeerWakeUps::send_if_due(double now) {
  constexpr double kFirst = 0.01;
  constexpr double kMostApart = 1.0;
  constexpr std::size_t kMostAtOnce = 8;  // most of a large number of peers wait, too
  if (!polling_.needed()) return;
  const double last = last_sent_ - activity_.quiet_since;  // negative: not in this wait
  const double next = last < 0 ? kFirst : std::fmin(2 * last, last + kMostApart);
  if (now - activity_.quiet_since < next) return;
  last_sent_ = now;
  const auto wake_up = [&](const std::vector<int>& ranks) {
    for (std::size_t i = 0; i < std::min(ranks.size(), kMostAtOnce); ++i) {
      const int rank = ranks[next_++ % ranks.size()];
      if (rank != rank_) mesh_.send_control(rank, encode_wake_up());
    }
  };
  for (const auto& [id, set] : registry_.sets()) wake_up(set->executor.blame());
  wake_up(point_to_point_.peers());
}

}  // namespace horoplug
