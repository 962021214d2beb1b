// Whole buffers between two ranks, in as many messages as they need.
#pragma once

#include "collectives/comm.h"

namespace horoplug {

// Queues a buffer, which must stay as it is until flushed().
void send_all(Comm& comm, int rank, const void* data, std::size_t bytes);
// Receives what the other rank has sent with send_all().
Task receive_all(Comm& comm, int rank, void* data, std::size_t bytes);

}  // namespace horoplug
