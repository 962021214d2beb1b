// Adasum: the dot products of two vectors, chunk by chunk, and their combination; all in float64.
//
// The order of additions is that of the elements in the chunk: first those of a thread in a tile,
// then a tree over the threads, then the tiles. It depends neither on the GPU, nor on alignment,
// nor on what else is in the batch. It is not that of the CPU's kernels.
#pragma once

#include "device/cuda/kernels/elements.h"
#include "device/cuda/kernels/tiles.h"

namespace horoplug::cuda {

HP_DEVICE void add(Dots& sum, const Dots& more) {
  sum.aa += more.aa;
  sum.ab += more.ab;
  sum.bb += more.bb;
}

// Adds the elements of `scratch`, one for each thread, into scratch[0].
HP_DEVICE void add_up(const Block& block, Dots* scratch) {
  block.sync();
  for (u32 half = kThreads / 2; half > 0; half /= 2) {
    block.each([&](u32 thread) {
      if (thread < half) add(scratch[thread], scratch[thread + half]);
    });
    block.sync();
  }
}

template <class E>
struct DotsOf {
  using Packet = PacketOf<E>;
  using Stored = typename E::Stored;
  static constexpr int kPacket = Packet::kElements;

  HP_DEVICE static void add_element(Dots& sum, Stored a, Stored b) {
    const double x = E::get(a), y = E::get(b);
    add(sum, {x * x, x * y, y * y});
  }

  // The dot products of the elements that are assigned to this thread in a tile.
  HP_DEVICE static Dots of_thread(u32 thread, const Stored* a, const Stored* b, u64 begin, u64 end,
                                  bool aligned) {
    Dots sum{0, 0, 0};
    u64 i = begin + static_cast<u64>(thread) * kPacket;
    for (; i + kPacket <= end; i += static_cast<u64>(kPacket) * kThreads) {
      Stored x[kPacket], y[kPacket];
      if (aligned) {
        load<kPacket>(a + i, x);
        load<kPacket>(b + i, y);
      } else {
        HP_UNROLL
        for (int n = 0; n < kPacket; ++n) x[n] = a[i + n], y[n] = b[i + n];
      }
      HP_UNROLL
      for (int n = 0; n < kPacket; ++n) add_element(sum, x[n], y[n]);
    }
    for (; i < end; ++i) add_element(sum, a[i], b[i]);  // of a packet that the chunk does not fill
    return sum;
  }

  HP_DEVICE static void run(const Block& block, const DotsArgs& args, Dots* scratch) {
    for_each_tile(block, args.batch, Packet::kTile,
                  [&](const Chunk& chunk, u32, u32 tile, u64 begin, u64 end) {
                    const auto* const a = reinterpret_cast<const Stored*>(args.a + chunk.from);
                    const auto* const b = reinterpret_cast<const Stored*>(args.b + chunk.from);
                    block.each([&](u32 thread) {
                      scratch[thread] =
                          of_thread(thread, a, b, begin, end, (chunk.flags & kAligned) != 0);
                    });
                    add_up(block, scratch);
                    block.each([&](u32 thread) {
                      if (thread == 0) args.of_tiles[tile] = scratch[0];
                    });
                    block.sync();
                  });
  }
};

// Adds the dot products of the tiles of each chunk. A block handles every count()-th chunk.
struct SumOfTiles {
  HP_DEVICE static void run(const Block& block, const SumArgs& args, Dots* scratch) {
    for (u32 at = block.index(); at < args.batch.chunk_count; at += block.count()) {
      const u32 first = args.batch.chunks[at].first_tile;
      const u32 end =
          at + 1 < args.batch.chunk_count ? args.batch.chunks[at + 1].first_tile : args.batch.tiles;
      block.each([&](u32 thread) {
        Dots sum{0, 0, 0};
        for (u32 tile = first + thread; tile < end; tile += kThreads) {
          add(sum, args.of_tiles[tile]);
        }
        scratch[thread] = sum;
      });
      add_up(block, scratch);
      block.each([&](u32 thread) {
        if (thread == 0) args.of_chunks[at] = scratch[0];
      });
      block.sync();
    }
  }
};

// What a vector is multiplied by; `square` is its dot product with itself.
HP_DEVICE double coefficient(double square, double product) {
  return square == 0 ? 1 : 1 - product / (2 * square);
}

// As BlendFn of device/cpu/kernels.h, with the coefficients from the dot products of whole chunks.
template <class From, class To>
struct Blend {
  using Packet = PacketOf<From, To>;
  static constexpr int kInFlight = kUnroll;
  using Read = typename From::Stored;
  using Written = typename To::Stored;

  const Read *a, *b;
  Written* to;
  double of_a, of_b;

  template <int N, int U>
  HP_DEVICE void at(u64 first, u64 stride) const {
    Read x[U][N], y[U][N];
    HP_UNROLL
    for (int u = 0; u < U; ++u) {
      load<N>(a + first + u * stride, x[u]);
      load<N>(b + first + u * stride, y[u]);
    }
    HP_UNROLL
    for (int u = 0; u < U; ++u) {
      Written written[N];
      HP_UNROLL
      for (int n = 0; n < N; ++n) {
        const double v = static_cast<double>(From::get(x[u][n])) * of_a +
                         static_cast<double>(From::get(y[u][n])) * of_b;
        written[n] = To::put(static_cast<typename To::Value>(one_nan(v)));
      }
      store<N>(to + first + u * stride, written);
    }
  }

  HP_DEVICE static void run(const Block& block, const BlendArgs& args) {
    for_each_tile(block, args.batch, Packet::kTile,
                  [&](const Chunk& chunk, u32 index, u32, u64 begin, u64 end) {
                    const Dots dots = args.of_chunks[index];
                    const Blend body{reinterpret_cast<const Read*>(args.a + chunk.from),
                                     reinterpret_cast<const Read*>(args.b + chunk.from),
                                     reinterpret_cast<Written*>(chunk.to),
                                     coefficient(dots.aa, dots.ab), coefficient(dots.bb, dots.ab)};
                    block.each([&](u32 thread) {
                      over_range<Packet::kElements>(thread, begin, end,
                                                    (chunk.flags & kAligned) != 0, body);
                    });
                  });
  }
};

}  // namespace horoplug::cuda
