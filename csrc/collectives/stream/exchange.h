// Exchanges whole buffers between two ranks, in as many messages as needed.
#pragma once

#include "collectives/comm.h"

namespace horoplug {

// Queues a buffer, which must stay unchanged until flushed().
void send_all(Comm& comm, int rank, const void* data, std::size_t bytes);
// Receives the data that the other rank sends by send_all().
Task receive_all(Comm& comm, int rank, void* data, std::size_t bytes);

// The same, but an empty buffer is sent as one empty message, so that its receiver hears from its
// sender.
std::size_t messages_of(std::size_t bytes);
void send_even_if_empty(Comm& comm, int rank, const void* data, std::size_t bytes);
Task receive_even_if_empty(Comm& comm, int rank, void* data, std::size_t bytes);

}  // namespace horoplug
