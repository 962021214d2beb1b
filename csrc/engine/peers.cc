#include "engine/peers.h"

#include <string>

#include "base/status.h"
#include "controller/messages/messages.h"

namespace horoplug {
namespace {

// For how long a peer whose connections fail, but for the first one, may say why.
constexpr Seconds kTimeForReason{1};

}  // namespace

void Peers::check_links() {
  const std::uint64_t failures = mesh_.failures();
  if (failures == checked_failures_) return;
  const SteadyTime now = steady_now();
  bool undecided = false;
  for (int peer = 0; peer < mesh_.size(); ++peer) {
    if (has_departed(peer)) continue;
    const Link* link = mesh_.failed(peer);
    // Mesh::failed() reads what is left, which may be this peer's goodbye.
    if (link == nullptr || has_departed(peer)) continue;
    if (link != mesh_.link(peer) && link->closed_by_peer() && !said_bye_) {
      // The peer says why it leaves over its first connection, whose data may arrive later than the
      // end of another one.
      if (!undecided_since_) undecided_since_ = now;
      if (now - *undecided_since_ < kTimeForReason) {
        undecided = true;
        continue;
      }
    }
    departed_[peer] = true;
    if (said_bye_) continue;
    const std::string what = link->closed_by_peer() ? " has died or lost its connection: " : ": ";
    throw Error(HP_ABORTED, "rank " + std::to_string(peer) + what + *link->failure());
  }
  if (undecided) return;
  undecided_since_.reset();
  checked_failures_ = failures;
}

void Peers::receive_bye(int from) {
  departed_[from] = true;
  any_departed_ = true;
  // The peer waits for this side to close as well.
  mesh_.link(from)->close_write();
}

void Peers::say_bye() {
  said_bye_ = true;
  mesh_.send_control_to_connected(encode(MessageKind::kBye));
  mesh_.close_writes();
}

}  // namespace horoplug
