#include "engine/watchdog/suspicion.h"

#include "base/status.h"

namespace horoplug {

Suspicion::Finding Suspicion::examine(const std::vector<int>& ranks, Seconds waited, Seconds limit,
                                      RunningTime now) {
  Finding finding{waited >= limit, {}};
  for (const int rank : ranks) {
    Peer& peer = peers_[static_cast<std::size_t>(rank)];
    const bool is_recent = peer.pinged_at && now - *peer.pinged_at < patience(limit);
    if (rank != rank_ && !peer.owes_answer && !is_recent && arises(waited, limit)) {
      peer = {.pinged_at = now, .owes_answer = true};
      pings_.push_back(rank);
    } else if (peer.owes_answer && !is_recent) {
      finding.silent.push_back(rank);
    }
  }
  return finding;
}

std::string Suspicion::Finding::describe_silent() const {
  if (silent.empty()) return {};
  return describe_ranks(silent) + (silent.size() == 1 ? ", which does" : ", which do") +
         " not answer";
}

std::string Suspicion::Finding::blame(const std::vector<int>& ranks) const {
  return silent.empty() ? describe_ranks(ranks) : describe_silent();
}

}  // namespace horoplug
