#include "collectives/stream/ring.h"

#include <deque>

#include "base/cache_line.h"

namespace horoplug {
namespace {

// Receives posted ahead of the current chunk.
constexpr std::size_t kRingWindow = 8;

// The number of chunks of a part, unless they would be too small. A chunk is forwarded only when
// all of it has arrived, and the link should stay busy until then.
constexpr std::size_t kRingChunks = 4;
constexpr std::size_t kLeastRingChunk = 32 * 1024;

std::size_t chunk_bytes_for(std::span<const Part> parts, std::size_t most) {
  std::size_t largest = 0;
  for (const Part& part : parts) largest = std::max(largest, part.bytes);
  return std::clamp(round_down_to_lines(largest / kRingChunks), std::min(kLeastRingChunk, most),
                    most);
}

// An empty part is sent as one empty message. A part that has passed around the ring proves that
// all ranks take part, and every rank needs this proof: reducescatter by ring claims that it defers
// writes.
std::size_t messages_of(const Part& part, std::size_t chunk_bytes) {
  return std::max<std::size_t>(chunk_count(part.bytes, chunk_bytes), 1);
}

struct IncomingChunk {
  int step;
  Part part;
};

// All chunks that this rank will receive, in order.
std::vector<IncomingChunk> incoming(const RingPass& pass, std::size_t chunk_bytes) {
  const int size = static_cast<int>(pass.parts.size());
  std::vector<IncomingChunk> chunks;
  for (int step = 0; step < pass.steps; ++step) {
    const Part& part =
        pass.parts[static_cast<std::size_t>((pass.first + 2 * size - step - 1) % size)];
    for (std::size_t i = 0; i < messages_of(part, chunk_bytes); ++i) {
      chunks.push_back({step, chunk_of(part, i, chunk_bytes)});
    }
  }
  return chunks;
}

}  // namespace

Task ring_pass(Comm& comm, const Call& call, RingPass pass) {
  const int next = (comm.rank() + 1) % comm.size();
  const int previous = (comm.rank() + comm.size() - 1) % comm.size();
  const std::size_t grain = call.grain();

  const std::size_t chunk_bytes = chunk_bytes_for(pass.parts, comm.chunk_bytes());
  const Part& own = pass.parts[static_cast<std::size_t>(pass.first)];
  for (std::size_t i = 0; i < messages_of(own, chunk_bytes); ++i) {
    const Part chunk = chunk_of(own, i, chunk_bytes);
    comm.send(next, pass.buffer + chunk.begin, chunk.bytes);
  }

  const std::vector<IncomingChunk> chunks = incoming(pass, chunk_bytes);
  std::byte* const arrivals =
      pass.reduce_steps > 0 ? comm.scratch(Scratch::kReceive, kRingWindow * chunk_bytes) : nullptr;
  // The destination of a received chunk: beside the buffer if it will be combined, otherwise
  // directly in the buffer. That memory is free by then: the arriving chunk has passed the whole
  // ring since this rank sent its own share.
  const auto target = [&](std::size_t i) {
    return chunks[i].step < pass.reduce_steps ? arrivals + (i % kRingWindow) * chunk_bytes
                                              : pass.buffer + chunks[i].part.begin;
  };

  std::deque<Link::Receive> posted;
  std::size_t next_post = 0;
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    for (; next_post < chunks.size() && next_post < i + kRingWindow; ++next_post) {
      comm.post(posted, previous, target(next_post), chunks[next_post].part.bytes);
    }
    co_await posted.front();
    posted.pop_front();

    const IncomingChunk& chunk = chunks[i];
    std::byte* const place = pass.buffer + chunk.part.begin;
    if (chunk.step < pass.reduce_steps) {
      const void* const sources[] = {target(i), place};
      const bool last = chunk.step == pass.reduce_steps - 1;
      call.reduce(place, sources, 2, chunk.part.bytes / grain, last ? call.finish : Finish{});
    }
    if (chunk.step < pass.steps - 1) comm.send(next, place, chunk.part.bytes);
  }
  co_await comm.flushed();
}

}  // namespace horoplug
