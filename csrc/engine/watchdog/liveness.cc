#include "engine/watchdog/liveness.h"

#include <utility>

#include "base/status.h"
#include "controller/messages/messages.h"

namespace horoplug {

void Liveness::ask(const std::vector<int>& ranks, SteadyTime now, Seconds interval) {
  for (const int rank : ranks) {
    Peer& peer = peers_[static_cast<std::size_t>(rank)];
    if (rank == rank_ || peer.owes_answer || now - peer.asked_at < interval) continue;
    peer = {.asked_at = now, .owes_answer = true};
    mesh_.send_control(rank, encode_ping());
  }
}

void Liveness::receive_pong(int from) {
  peers_[static_cast<std::size_t>(from)].owes_answer = false;
}

void Liveness::excuse(const LostTime& lost) {
  for (Peer& peer : peers_) lost.extend(peer.asked_at);
}

std::vector<int> Liveness::silent(std::vector<int> ranks, SteadyTime now, Seconds patience) const {
  std::erase_if(ranks, [&](int rank) {
    const Peer& peer = peers_[static_cast<std::size_t>(rank)];
    return !peer.owes_answer || now - peer.asked_at < patience;
  });
  return ranks;
}

std::string Liveness::describe_silent(std::vector<int> ranks, SteadyTime now,
                                      Seconds patience) const {
  const std::vector<int> missing = silent(std::move(ranks), now, patience);
  if (missing.empty()) return {};
  return describe_ranks(missing) + (missing.size() == 1 ? ", which does" : ", which do") +
         " not answer";
}

}  // namespace horoplug
