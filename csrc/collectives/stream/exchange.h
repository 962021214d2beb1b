// Exchanges whole buffers between two ranks, in as many messages as needed.
#pragma once

#include "collectives/comm.h"

namespace horoplug {

// Queues a buffer, which must stay unchanged until flushed().
void send_all(Comm& comm, int rank, const void* data, std::size_t bytes);
// Receives the data that the other rank sends by send_all().
Task receive_all(Comm& comm, int rank, void* data, std::size_t bytes);

}  // namespace horoplug
