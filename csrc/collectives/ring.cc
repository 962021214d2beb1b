#include "collectives/ring.h"

#include <deque>

namespace horoplug {
namespace {

// Receives posted ahead of the chunk that is being worked on.
constexpr std::size_t kWindow = 8;

struct Piece {
  int step;
  Part part;
};

// Everything that this rank will receive, in order.
std::vector<Piece> incoming(const RingPass& pass) {
  const int size = static_cast<int>(pass.parts.size());
  std::vector<Piece> pieces;
  for (int step = 0; step < pass.steps; ++step) {
    const Part& part =
        pass.parts[static_cast<std::size_t>((pass.first + 2 * size - step - 1) % size)];
    const std::size_t chunks = chunk_count(part.bytes, Comm::kChunkBytes);
    for (std::size_t i = 0; i < chunks; ++i) {
      pieces.push_back({step, chunk_of(part, i, Comm::kChunkBytes)});
    }
  }
  return pieces;
}

}  // namespace

Task ring_pass(Comm& comm, const Call& call, RingPass pass) {
  const int next = (comm.rank() + 1) % comm.size();
  const int previous = (comm.rank() + comm.size() - 1) % comm.size();
  const std::size_t element = dtype_size(call.dtype);

  const Part& own = pass.parts[static_cast<std::size_t>(pass.first)];
  for (std::size_t i = 0; i < chunk_count(own.bytes, Comm::kChunkBytes); ++i) {
    const Part chunk = chunk_of(own, i, Comm::kChunkBytes);
    comm.send(next, pass.buffer + chunk.begin, chunk.bytes);
  }

  const std::vector<Piece> pieces = incoming(pass);
  std::byte* const arrivals = pass.reduce_steps > 0
                                  ? comm.scratch(Scratch::kReceive, kWindow * Comm::kChunkBytes)
                                  : nullptr;
  // Where a piece is received: what will be combined goes beside the buffer, the rest right into
  // it. That memory is free then: what comes in has been around the whole ring since this rank sent
  // its own share of it.
  const auto target = [&](std::size_t i) {
    return pieces[i].step < pass.reduce_steps ? arrivals + (i % kWindow) * Comm::kChunkBytes
                                              : pass.buffer + pieces[i].part.begin;
  };

  std::deque<Link::Receive> posted;
  std::size_t next_post = 0;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    for (; next_post < pieces.size() && next_post < i + kWindow; ++next_post) {
      comm.post(posted, previous, target(next_post), pieces[next_post].part.bytes);
    }
    co_await posted.front();
    posted.pop_front();

    const Piece& piece = pieces[i];
    std::byte* const place = pass.buffer + piece.part.begin;
    if (piece.step < pass.reduce_steps) {
      const void* const sources[] = {target(i), place};
      const bool last = piece.step == pass.reduce_steps - 1;
      call.reduce(place, sources, 2, piece.part.bytes / element, last ? call.finish : Finish{});
    }
    if (piece.step < pass.steps - 1) comm.send(next, place, piece.part.bytes);
  }
  co_await comm.flushed();
}

}  // namespace horoplug
