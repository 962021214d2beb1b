#include "collectives/stream/exchange.h"

#include <deque>

#include "collectives/partition.h"

namespace horoplug {

namespace {

void send_messages(Comm& comm, int rank, const void* data, std::size_t bytes,
                   std::size_t messages) {
  for (std::size_t i = 0; i < messages; ++i) {
    const Part chunk = chunk_of({0, bytes}, i, Comm::kChunkBytes);
    comm.send(rank, static_cast<const std::byte*>(data) + chunk.begin, chunk.bytes);
  }
}

Task receive_messages(Comm& comm, int rank, void* data, std::size_t bytes, std::size_t messages) {
  std::deque<Link::Receive> posted;
  for (std::size_t i = 0; i < messages; ++i) {
    const Part chunk = chunk_of({0, bytes}, i, Comm::kChunkBytes);
    comm.post(posted, rank, static_cast<std::byte*>(data) + chunk.begin, chunk.bytes);
  }
  for (auto& receive : posted) co_await receive;
}

}  // namespace

void send_all(Comm& comm, int rank, const void* data, std::size_t bytes) {
  send_messages(comm, rank, data, bytes, chunk_count(bytes, Comm::kChunkBytes));
}

Task receive_all(Comm& comm, int rank, void* data, std::size_t bytes) {
  return receive_messages(comm, rank, data, bytes, chunk_count(bytes, Comm::kChunkBytes));
}

std::size_t messages_of(std::size_t bytes) {
  return std::max<std::size_t>(chunk_count(bytes, Comm::kChunkBytes), 1);
}

void send_even_if_empty(Comm& comm, int rank, const void* data, std::size_t bytes) {
  send_messages(comm, rank, data, bytes, messages_of(bytes));
}

Task receive_even_if_empty(Comm& comm, int rank, void* data, std::size_t bytes) {
  return receive_messages(comm, rank, data, bytes, messages_of(bytes));
}

}  // namespace horoplug
