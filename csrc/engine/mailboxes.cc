#include "engine/mailboxes.h"

#include <map>
#include <utility>
#include <vector>

#include "transport/shm/mailbox.h"

namespace horoplug {

void use_mailboxes(const EngineConfig& config, SegmentAllocator& segments, Mesh& mesh) {
  std::map<int, std::size_t> ranks;  // by host
  for (const Member& member : config.members) ++ranks[member.host];
  const int here = config.self().host;
  std::vector<Neighbor> neighbors;
  std::size_t self = 0;
  for (int rank = 0; rank < config.size(); ++rank) {
    const Member& member = config.members[rank];
    const std::size_t on_its_host = ranks.at(member.host);
    if (on_its_host == 1 || on_its_host > Mailbox::kMostRanks) continue;
    const std::size_t bytes = Mailbox::bytes(on_its_host);
    const std::size_t offset = segments.reserve(rank, bytes).offset;
    if (member.host != here || !member.segment_file) continue;
    if (rank == config.rank) self = neighbors.size();
    Segment::extend(member.segment_file, offset + bytes);
    neighbors.push_back(
        {rank, Mailbox(Segment::map(member.segment_file, bytes, offset)), member.doorbell});
  }
  if (neighbors.size() == ranks.at(here) && neighbors.size() > 1) {
    mesh.use_mailboxes(neighbors, self);
  }
}

}  // namespace horoplug
