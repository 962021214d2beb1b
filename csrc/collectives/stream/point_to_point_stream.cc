// A tensor over the links between two ranks, in windows, so that a large tensor does not keep other
// frames from a link for long.
#include <deque>

#include "collectives/partition.h"
#include "collectives/point_to_point.h"

namespace horoplug {

Task send_stream(Comm& comm, const std::byte* data, std::size_t bytes) {
  for (std::size_t i = 0; i < chunk_count(bytes, Comm::kChunkBytes); ++i) {
    const Part chunk = chunk_of({0, bytes}, i, Comm::kChunkBytes);
    comm.send(kTransferPeer, data + chunk.begin, chunk.bytes);
    if (i % kStreamWindow == kStreamWindow - 1) co_await comm.flushed();
  }
  co_await comm.flushed();
}

Task receive_stream(Comm& comm, std::byte* data, std::size_t bytes) {
  std::deque<Link::Receive> posted;
  const std::size_t chunks = chunk_count(bytes, Comm::kChunkBytes);
  std::size_t next = 0;
  for (std::size_t i = 0; i < chunks; ++i) {
    for (; next < chunks && next < i + kStreamWindow; ++next) {
      const Part chunk = chunk_of({0, bytes}, next, Comm::kChunkBytes);
      comm.post(posted, kTransferPeer, data + chunk.begin, chunk.bytes);
    }
    co_await posted.front();
    posted.pop_front();
  }
}

}  // namespace horoplug
