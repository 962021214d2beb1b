// The kernels of Adasum: the dot products of two vectors, and their linear combination.
//
// Both compute in float64, whatever the elements are. Element i of a vector is added to lane i mod
// 8, as wide as the registers may be: all instruction sets give the same bits. 16-bit floats become
// float32 in blocks that stay in the L1 cache.
#pragma once

#include "device/cpu/kernels.h"
#include "device/cpu/kernels_finish.h"
#include "device/cpu/kernels_vector.h"

namespace horoplug {
namespace {

constexpr std::size_t kAdasumLanes = 8;
constexpr std::size_t kDoubles = kVectorBytes / sizeof(double);
constexpr std::size_t kUnits = kAdasumLanes / kDoubles;
using F64 = Vector<double>;

template <class T>
HP_INLINE F64 load_doubles(const char* from) {
  return __builtin_convertvector((load_vector<Vector<T, kDoubles>>(from)), F64);
}

// Sums that go on from block to block.
struct DotLanes {
  F64 aa[kUnits], ab[kUnits], bb[kUnits];

  template <class T>
  HP_INLINE void add(const char* a, const char* b) {
#pragma GCC unroll 4
    for (std::size_t u = 0; u < kUnits; ++u) {
      const F64 x = load_doubles<T>(a + u * kDoubles * sizeof(T));
      const F64 y = load_doubles<T>(b + u * kDoubles * sizeof(T));
      aa[u] += x * x;
      ab[u] += x * y;
      bb[u] += y * y;
    }
  }

  HP_INLINE static double sum(const F64* lanes) {
    double l[kAdasumLanes];
    __builtin_memcpy(l, lanes, sizeof(l));
    return ((l[0] + l[1]) + (l[2] + l[3])) + ((l[4] + l[5]) + (l[6] + l[7]));
  }
};

template <class T>
HP_INLINE void add_dots(const char* a, const char* b, std::size_t count, DotLanes* lanes) {
  constexpr std::size_t kBytes = kAdasumLanes * sizeof(T);
  DotLanes sums = *lanes;
  std::size_t left = count;
  for (; left >= kAdasumLanes; left -= kAdasumLanes, a += kBytes, b += kBytes) {
    sums.add<T>(a, b);
  }
  if (left > 0) {
    char x[kBytes] = {}, y[kBytes] = {};
    __builtin_memcpy(x, a, left * sizeof(T));
    __builtin_memcpy(y, b, left * sizeof(T));
    sums.add<T>(x, y);
  }
  *lanes = sums;
}

// A NaN is the positive quiet one without payload, as from the reductions.
template <class T>
HP_INLINE void blend_step(char* dst, const char* a, const char* b, double of_a, double of_b) {
  constexpr std::size_t kStep = kDoubles * sizeof(T);
#pragma GCC unroll 4
  for (std::size_t u = 0; u < kUnits; ++u) {
    const F64 x = load_doubles<T>(a + u * kStep) * of_a;
    F64 v = x + load_doubles<T>(b + u * kStep) * of_b;
    v = v == v ? v : F64{} + quiet_nan<double>();
    store_vector(dst + u * kStep, __builtin_convertvector(v, Vector<T, kDoubles>));
  }
}

template <class T>
HP_INLINE void blend_range(char* dst, const char* a, const char* b, std::size_t count, double of_a,
                           double of_b) {
  constexpr std::size_t kBytes = kAdasumLanes * sizeof(T);
  std::size_t left = count;
  for (; left >= kAdasumLanes; left -= kAdasumLanes, a += kBytes, b += kBytes, dst += kBytes) {
    blend_step<T>(dst, a, b, of_a, of_b);
  }
  if (left == 0) return;
  char x[kBytes] = {}, y[kBytes] = {};
  __builtin_memcpy(x, a, left * sizeof(T));
  __builtin_memcpy(y, b, left * sizeof(T));
  blend_step<T>(x, x, y, of_a, of_b);
  __builtin_memcpy(dst, x, left * sizeof(T));
}

HP_INLINE DotProducts products_of(const DotLanes& lanes) {
  return {DotLanes::sum(lanes.aa), DotLanes::sum(lanes.ab), DotLanes::sum(lanes.bb)};
}

template <class T>
DotProducts dots(const void* a, const void* b, std::size_t count) {
  DotLanes lanes{};
  add_dots<T>(static_cast<const char*>(a), static_cast<const char*>(b), count, &lanes);
  return products_of(lanes);
}

template <class T>
void blend(void* dst, const void* a, const void* b, std::size_t count, double of_a, double of_b) {
  blend_range<T>(static_cast<char*>(dst), static_cast<const char*>(a), static_cast<const char*>(b),
                 count, of_a, of_b);
}

// Calls use(a, b, first, count) with the two operands' elements as float32, block after block.
template <ConvertFn kToFloat, class Use>
HP_INLINE void in_blocks(const void* a, const void* b, std::size_t count, Use use) {
  constexpr std::size_t kBlock = 1024;
  float x[kBlock], y[kBlock];
  for (std::size_t at = 0; at < count; at += kBlock) {
    const std::size_t n = count - at < kBlock ? count - at : kBlock;
    kToFloat(x, static_cast<const char*>(a) + 2 * at, n);
    kToFloat(y, static_cast<const char*>(b) + 2 * at, n);
    use(reinterpret_cast<const char*>(x), reinterpret_cast<const char*>(y), at, n);
  }
}

template <ConvertFn kToFloat>
DotProducts half_dots(const void* a, const void* b, std::size_t count) {
  DotLanes lanes{};
  in_blocks<kToFloat>(a, b, count, [&](const char* x, const char* y, std::size_t, std::size_t n) {
    add_dots<float>(x, y, n, &lanes);
  });
  return products_of(lanes);
}

template <ConvertFn kToFloat>
void half_blend(void* dst, const void* a, const void* b, std::size_t count, double of_a,
                double of_b) {
  char* const to = static_cast<char*>(dst);
  in_blocks<kToFloat>(a, b, count,
                      [&](const char* x, const char* y, std::size_t at, std::size_t n) {
                        blend_range<float>(to + 4 * at, x, y, n, of_a, of_b);
                      });
}

}  // namespace
}  // namespace horoplug
