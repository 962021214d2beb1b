// A rank's place in the tree of a process set, where messages come from and go to: checks the
// senders of messages, and collects the messages to the parent and the children until they are
// taken.
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "base/wire.h"
#include "controller/state/topology.h"

namespace horoplug {

class TreeNode {
 public:
  struct Outgoing {
    int to;
    Bytes message;
  };

  explicit TreeNode(TreePosition position) : position_(std::move(position)) {}

  const TreePosition& position() const { return position_; }
  bool is_root() const { return position_.is_root(); }

  // The number of a child among the children. Throws WireError if the sender is not a child.
  std::size_t child_index(int from) const {
    const auto found = std::find(position_.children.begin(), position_.children.end(), from);
    if (found == position_.children.end()) {
      throw WireError("the sender is not a child of this rank");
    }
    return static_cast<std::size_t>(found - position_.children.begin());
  }
  // Throws WireError if the sender is not the parent.
  void require_parent(int from) const {
    if (from != position_.parent) throw WireError("the sender is not the parent of this rank");
  }

  void send_to_parent(Bytes message) {
    outgoing_.push_back({position_.parent, std::move(message)});
  }
  void send_to_children(const Bytes& message) {
    for (const int child : position_.children) outgoing_.push_back({child, message});
  }
  // The messages since the last call, in order.
  std::vector<Outgoing> take_outgoing() { return std::exchange(outgoing_, {}); }

 private:
  const TreePosition position_;
  std::vector<Outgoing> outgoing_;
};

}  // namespace horoplug
