// Takes control messages from the links to the parts of the engine that they are for. Used by the
// thread that runs the loop.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "controller/messages/messages.h"
#include "engine/handshake.h"
#include "engine/lifecycle.h"
#include "engine/peers.h"
#include "engine/point_to_point.h"
#include "engine/process_set_registry.h"
#include "engine/tracing.h"
#include "engine/watchdog/stall_inspector.h"
#include "engine/watchdog/suspicion.h"
#include "transport/mesh.h"

namespace horoplug {

class MessageDispatcher {
 public:
  MessageDispatcher(const Lifecycle& lifecycle, Mesh& mesh, Handshake& handshake,
                    ProcessSetRegistry& registry, PointToPoint& point_to_point,
                    StallInspector& stalls, Suspicion& suspicion, Peers& peers, Tracing& tracing)
      : lifecycle_(lifecycle),
        mesh_(mesh),
        handshake_(handshake),
        registry_(registry),
        point_to_point_(point_to_point),
        stalls_(stalls),
        suspicion_(suspicion),
        peers_(peers),
        tracing_(tracing) {}

  // Handles a message. Throws WireError if it is invalid, Error if the job has failed.
  void receive(int from, Bytes message);
  // The start is over: delivers what came early.
  void deliver_early();
  // A process set exists now: delivers what came for it early.
  void deliver_early(std::uint32_t set);

 private:
  using Kept = std::vector<std::pair<int, Bytes>>;  // with the senders

  void dispatch(int from, std::span<const std::byte> message);
  void dispatch_offer(int from, const MessageHead& head, Reader& reader,
                      std::span<const std::byte> message);
  void deliver(const Kept& messages);
  ProcessSet* set_of(std::uint32_t number, int from, std::span<const std::byte> message);

  const Lifecycle& lifecycle_;
  Mesh& mesh_;
  Handshake& handshake_;
  ProcessSetRegistry& registry_;
  PointToPoint& point_to_point_;
  StallInspector& stalls_;
  Suspicion& suspicion_;
  Peers& peers_;
  Tracing& tracing_;

  Kept early_;                                  // from peers that were ready before this rank
  std::map<std::uint32_t, Kept> early_by_set_;  // for sets that do not exist on this rank yet
};

}  // namespace horoplug
