// Packing and unpacking: copies every chunk of a batch to where it belongs, scaled and converted on
// the way.
#pragma once

#include "device/cuda/kernels/finish.h"
#include "device/cuda/kernels/tiles.h"

namespace horoplug::cuda {

template <class From, class To>
struct Move {
  using Packet = PacketOf<From, To>;
  static constexpr int kInFlight = kUnroll;
  using Read = typename From::Stored;
  using Written = typename To::Stored;

  const Read* from;
  Written* to;
  const FinishArgs& finish;

  template <int N, int U>
  HP_DEVICE void at(u64 first, u64 stride) const {
    Read read[U][N];
    HP_UNROLL
    for (int u = 0; u < U; ++u) load<N>(from + first + u * stride, read[u]);
    HP_UNROLL
    for (int u = 0; u < U; ++u) {
      Written written[N];
      HP_UNROLL
      for (int n = 0; n < N; ++n) {
        typename From::Value value = From::get(read[u][n]);
        if (finish.mode != kNoFinish) value = finished<From>(value, finish);
        written[n] = To::put(value);
      }
      store<N>(to + first + u * stride, written);
    }
  }

  HP_DEVICE static void run(const Block& block, const MoveArgs& args) {
    for_each_tile(
        block, args.batch, Packet::kTile, [&](const Chunk& chunk, u32, u32, u64 begin, u64 end) {
          Written* const to = reinterpret_cast<Written*>(chunk.to);
          if ((chunk.flags & kFill) != 0) {
            Written element{};
            memcpy(&element, &chunk.from,
                   sizeof element < sizeof chunk.from ? sizeof element : sizeof chunk.from);
            block.each([&](u32 thread) {
              for (u64 i = begin + thread; i < end; i += kThreads) to[i] = element;
            });
            return;
          }
          const Move body{reinterpret_cast<const Read*>(chunk.from), to, args.finish};
          block.each([&](u32 thread) {
            over_range<Packet::kElements>(thread, begin, end, (chunk.flags & kAligned) != 0, body);
          });
        });
  }
};

}  // namespace horoplug::cuda
