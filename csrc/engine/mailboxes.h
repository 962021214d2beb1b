// The mailboxes of the ranks of this host: see transport/shm/mailbox.h.
#pragma once

#include "engine/options.h"
#include "engine/segment_allocator.h"
#include "transport/mesh.h"

namespace horoplug {

// Reserves memory for the mailboxes of all ranks, maps those of this host, and lets the links to
// its ranks use them. Does nothing on a host with a single rank, with more ranks than a mailbox has
// bits, or without shared memory. All ranks call it at the same point of their reservations.
void use_mailboxes(const EngineConfig& config, SegmentAllocator& segments, Mesh& mesh);

}  // namespace horoplug
