// Reduces several sources, which may be memory of other GPUs, into where the chunks belong. Every
// source is read once; each element sees them in the order given.
#pragma once

#include "device/cuda/kernels/finish.h"
#include "device/cuda/kernels/tiles.h"

namespace horoplug::cuda {

template <class E, class Op>
struct Reduce {
  using Packet = PacketOf<E>;
  // The accumulators of a packet of bytes fill sixteen registers.
  static constexpr int kInFlight = sizeof(typename E::Stored) == 1 ? 2 : kUnroll;
  using Stored = typename E::Stored;

  const ReduceArgs& args;
  u64 offset;
  Stored* to;

  template <int N, int U>
  HP_DEVICE void read_source(u32 source, u64 first, u64 stride, Stored (&read)[U][N]) const {
    const Stored* const from =
        reinterpret_cast<const Stored*>(args.source[source] + offset) + first;
    HP_UNROLL
    for (int u = 0; u < U; ++u) load<N>(from + u * stride, read[u]);
  }

  // Accumulators of 16-bit types are twice as wide as what is stored.
  template <int N, int U>
  HP_DEVICE void at(u64 first, u64 stride) const {
    Stored read[U][N];
    typename E::Value sum[U][N];
    read_source(0, first, stride, read);
    HP_UNROLL
    for (int u = 0; u < U; ++u) {
      HP_UNROLL
      for (int n = 0; n < N; ++n) sum[u][n] = E::get(read[u][n]);
    }
    for (u32 s = 1; s < args.sources; ++s) {
      read_source(s, first, stride, read);
      HP_UNROLL
      for (int u = 0; u < U; ++u) {
        HP_UNROLL
        for (int n = 0; n < N; ++n) {
          sum[u][n] = Op::template apply<E>(sum[u][n], E::get(read[u][n]));
        }
      }
    }
    HP_UNROLL
    for (int u = 0; u < U; ++u) {
      Stored written[N];
      HP_UNROLL
      for (int n = 0; n < N; ++n) written[n] = E::put(finished<E>(sum[u][n], args.finish));
      store<N>(to + first + u * stride, written);
    }
  }

  HP_DEVICE static void run(const Block& block, const ReduceArgs& args) {
    for_each_tile(
        block, args.batch, Packet::kTile, [&](const Chunk& chunk, u32, u32, u64 begin, u64 end) {
          const Reduce body{args, chunk.from, reinterpret_cast<Stored*>(chunk.to)};
          block.each([&](u32 thread) {
            over_range<Packet::kElements>(thread, begin, end, (chunk.flags & kAligned) != 0, body);
          });
        });
  }
};

}  // namespace horoplug::cuda
