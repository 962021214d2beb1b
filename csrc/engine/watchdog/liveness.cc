#include "engine/watchdog/liveness.h"

#include <utility>

#include "base/status.h"
#include "controller/messages.h"

namespace horoplug {

void Liveness::update(bool late) {
  if (!late) {
    answered_.clear();
  } else if (answered_.empty()) {
    answered_.assign(static_cast<std::size_t>(mesh_.size()), false);
    answered_[static_cast<std::size_t>(rank_)] = true;
    mesh_.send_control_to_all(encode_ping());
  }
}

void Liveness::receive_pong(int from) {
  if (!answered_.empty()) answered_[static_cast<std::size_t>(from)] = true;
}

std::vector<int> Liveness::silent(std::vector<int> ranks) const {
  if (answered_.empty()) return {};
  std::erase_if(ranks, [this](int rank) { return answered_[static_cast<std::size_t>(rank)]; });
  return ranks;
}

std::string Liveness::describe_silent(std::vector<int> ranks) const {
  const std::vector<int> missing = silent(std::move(ranks));
  if (missing.empty()) return {};
  return describe_ranks(missing) + (missing.size() == 1 ? ", which does" : ", which do") +
         " not answer";
}

}  // namespace horoplug
