// Allreduce by direct exchange: every rank sends each other rank that rank's part, reduces its own
// part from all ranks at once, and sends the result to all. This takes the latency of two messages,
// whatever the number of ranks, and sends as many bytes as a ring. p - 1 flows arrive at once,
// which suits few hosts. The first half is the pairwise reduce-scatter of Thakur, Rabenseifner and
// Gropp ("Optimization of collective communication operations in MPICH", 2005), with all messages
// in flight at once.
//
// Operands are combined in rank order, with float32 accumulation for 16-bit floats, by one rank for
// each element. A result depends on every rank's contribution, so no output is written before every
// rank takes part.
#include <deque>

#include "base/cache_line.h"
#include "collectives/collective.h"
#include "collectives/partition.h"

namespace horoplug {
namespace {

// Receives posted ahead of the current chunk, for each peer.
constexpr std::size_t kPairwiseWindow = 8;
// The number of chunks of a part, unless they would be too small: one chunk is reduced and sent
// back while others arrive.
constexpr std::size_t kPairwiseChunks = 2;
constexpr std::size_t kLeastPairwiseChunk = 64 * 1024;

std::size_t chunk_bytes_for(std::size_t bytes, int ranks, std::size_t most) {
  const std::size_t wanted =
      round_down_to_lines(bytes / static_cast<std::size_t>(ranks) / kPairwiseChunks);
  return std::clamp(wanted, std::min(kLeastPairwiseChunk, most), most);
}

}  // namespace

Task allreduce_pairwise(Comm& comm, Call& call) {
  Layout& layout = *call.layout;
  const int size = comm.size();
  const auto me = static_cast<std::size_t>(comm.rank());
  const std::size_t grain = call.grain();
  const std::size_t chunk_bytes = chunk_bytes_for(layout.bytes(), size, comm.chunk_bytes());
  const auto parts = split_evenly(layout.bytes(), size, grain);
  const Part& own = parts[me];
  std::byte* work = layout.in_place();
  if (work == nullptr) {
    work = comm.scratch(Scratch::kWork, layout.bytes());
    layout.pack(0, layout.bytes(), work);
  }

  // Each rank begins with a different peer.
  std::vector<int> peers;
  for (int i = 1; i < size; ++i) peers.push_back((comm.rank() + i) % size);
  for (std::size_t i = 0; i < chunk_count(parts.front().bytes, chunk_bytes);
       ++i) {  // no part is larger
    for (const int peer : peers) {
      const Part chunk = chunk_of(parts[static_cast<std::size_t>(peer)], i, chunk_bytes);
      if (chunk.bytes > 0) comm.send(peer, work + chunk.begin, chunk.bytes);
    }
  }

  const std::size_t chunks = chunk_count(own.bytes, chunk_bytes);
  const std::size_t room = std::min(own.bytes, chunk_bytes);
  std::byte* const arrivals =
      comm.scratch(Scratch::kReceive, static_cast<std::size_t>(size) * kPairwiseWindow * room);
  const auto place = [&](int rank, std::size_t i) {
    return arrivals +
           (static_cast<std::size_t>(rank) * kPairwiseWindow + i % kPairwiseWindow) * room;
  };
  std::vector<std::deque<Link::Receive>> posted(static_cast<std::size_t>(size));
  const auto post_contributions = [&](std::size_t i) {
    for (const int peer : peers) {
      comm.post(posted[static_cast<std::size_t>(peer)], peer, place(peer, i),
                chunk_of(own, i, chunk_bytes).bytes);
    }
  };
  // Directly into the buffer: a peer has received this rank's share of its part before it sends the
  // result.
  const auto post_results = [&] {
    for (const int peer : peers) {
      const auto rank = static_cast<std::size_t>(peer);
      for (std::size_t i = 0; i < chunk_count(parts[rank].bytes, chunk_bytes); ++i) {
        const Part chunk = chunk_of(parts[rank], i, chunk_bytes);
        comm.post(posted[rank], peer, work + chunk.begin, chunk.bytes);
      }
    }
  };

  std::vector<const void*> sources(static_cast<std::size_t>(size));
  for (std::size_t i = 0; i < std::min(chunks, kPairwiseWindow); ++i) post_contributions(i);
  if (chunks <= kPairwiseWindow) post_results();
  for (std::size_t i = 0; i < chunks; ++i) {
    const Part chunk = chunk_of(own, i, chunk_bytes);
    for (const int peer : peers) {
      const auto rank = static_cast<std::size_t>(peer);
      co_await posted[rank].front();
      posted[rank].pop_front();
      sources[rank] = place(peer, i);
    }
    std::byte* const result = work + chunk.begin;
    sources[me] = result;
    call.reduce(result, sources.data(), size, chunk.bytes / grain, call.finish);
    for (const int peer : peers) comm.send(peer, result, chunk.bytes);
    if (i + kPairwiseWindow < chunks) post_contributions(i + kPairwiseWindow);
    if (i + kPairwiseWindow + 1 == chunks) post_results();
  }
  for (auto& window : posted) {
    for (; !window.empty(); window.pop_front()) co_await window.front();
  }
  co_await comm.flushed();
  layout.unpack(0, layout.bytes(), work);
}

}  // namespace horoplug
