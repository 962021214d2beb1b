// How the elements of a batch are assigned to blocks and threads.
#pragma once

#include "device/cuda/kernels/target.h"

namespace horoplug::cuda {

// Calls visit(chunk, its index, tile, begin, end) for each tile of this block: elements
// [begin, end) of the chunk. The block's tiles are consecutive, so that the first chunk is
// searched for once.
template <class Visit>
HP_DEVICE void for_each_tile(const Block& block, const Batch& batch, u32 tile_elements,
                             Visit visit) {
  u32 tile = static_cast<u32>(static_cast<u64>(batch.tiles) * block.index() / block.count());
  const u32 last =
      static_cast<u32>(static_cast<u64>(batch.tiles) * (block.index() + 1) / block.count());
  if (tile == last) return;
  u32 at = 0;  // the last chunk that begins at or before this tile
  for (u32 end = batch.chunk_count; end - at > 1;) {
    const u32 middle = at + (end - at) / 2;
    if (batch.chunks[middle].first_tile <= tile) {
      at = middle;
    } else {
      end = middle;
    }
  }
  for (; tile < last; ++tile) {
    if (at + 1 < batch.chunk_count && batch.chunks[at + 1].first_tile <= tile) ++at;
    const Chunk chunk = batch.chunks[at];
    const u64 begin = static_cast<u64>(tile - chunk.first_tile) * tile_elements;
    const u64 left = chunk.count - begin;
    visit(chunk, at, tile, begin, begin + (left < tile_elements ? left : tile_elements));
  }
}

// Calls body.at<packet, packets>(first element, stride) until the elements [begin, end) are done,
// by the threads of a block together: in packets of kPacket consecutive elements if they are
// aligned, otherwise one by one, neighbours by neighbouring threads. `begin` is a multiple of the
// packet. Body::kInFlight divides kUnroll: so many packets a thread works on at once.
template <int kPacket, class Body>
HP_DEVICE void over_range(u32 thread, u64 begin, u64 end, bool aligned, const Body& body) {
  u64 i = begin + thread;
  if (aligned) {
    constexpr u64 kStride = static_cast<u64>(kPacket) * kThreads;
    i = begin + static_cast<u64>(thread) * kPacket;
    if (end - begin == kStride * kUnroll) {
      for (u32 done = 0; done < kUnroll; done += Body::kInFlight, i += kStride * Body::kInFlight) {
        body.template at<kPacket, Body::kInFlight>(i, kStride);
      }
      return;
    }
    for (; i + kPacket <= end; i += kStride) body.template at<kPacket, 1>(i, 0);
    i = end - (end - begin) % kPacket + thread;
  }
  for (; i + (kUnroll - 1) * kThreads < end; i += kUnroll * kThreads) {
    body.template at<1, kUnroll>(i, kThreads);
  }
  for (; i < end; i += kThreads) body.template at<1, 1>(i, 0);
}

// N elements, which are whole vectors or a single one.
template <int N, class T>
HP_DEVICE void load(const T* from, T (&to)[N]) {
  if constexpr (N == 1) {
    to[0] = *from;
  } else {
    static_assert(N * sizeof(T) % 16 == 0, "no whole vectors");
    HP_UNROLL
    for (u32 k = 0; k < N * sizeof(T) / 16; ++k) {
      const Vector16 v = load16(from + k * (16 / sizeof(T)));
      memcpy(to + k * (16 / sizeof(T)), &v, 16);
    }
  }
}
template <int N, class T>
HP_DEVICE void store(T* to, const T (&from)[N]) {
  if constexpr (N == 1) {
    *to = from[0];
  } else {
    static_assert(N * sizeof(T) % 16 == 0, "no whole vectors");
    HP_UNROLL
    for (u32 k = 0; k < N * sizeof(T) / 16; ++k) {
      Vector16 v;
      memcpy(&v, from + k * (16 / sizeof(T)), 16);
      store16(to + k * (16 / sizeof(T)), v);
    }
  }
}

template <class From, class To = From>
struct PacketOf {
  static constexpr u32 kNarrower = sizeof(typename From::Stored) < sizeof(typename To::Stored)
                                       ? sizeof(typename From::Stored)
                                       : sizeof(typename To::Stored);
  static constexpr int kElements = kPacketBytes / kNarrower;
  static constexpr u32 kTile = kTileBytes / kNarrower;
};

}  // namespace horoplug::cuda
