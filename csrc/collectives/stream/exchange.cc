#include "collectives/stream/exchange.h"

#include <deque>

#include "collectives/partition.h"

namespace horoplug {

void send_all(Comm& comm, int rank, const void* data, std::size_t bytes) {
  for (std::size_t i = 0; i < chunk_count(bytes, Comm::kChunkBytes); ++i) {
    const Part chunk = chunk_of({0, bytes}, i, Comm::kChunkBytes);
    comm.send(rank, static_cast<const std::byte*>(data) + chunk.begin, chunk.bytes);
  }
}

Task receive_all(Comm& comm, int rank, void* data, std::size_t bytes) {
  std::deque<Link::Receive> posted;
  for (std::size_t i = 0; i < chunk_count(bytes, Comm::kChunkBytes); ++i) {
    const Part chunk = chunk_of({0, bytes}, i, Comm::kChunkBytes);
    comm.post(posted, rank, static_cast<std::byte*>(data) + chunk.begin, chunk.bytes);
  }
  for (auto& receive : posted) co_await receive;
}

}  // namespace horoplug
