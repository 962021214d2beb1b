// The kernels of Adasum: the dot products of two vectors, and their linear combination.
//
// Both compute in float64, whatever the elements are. Element i of a vector is added to lane i mod
// 8, however wide the registers are: all instruction sets give the same bits. 16-bit floats become
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
  return __builtin_convertvector(load_vector<Vector<T, kDoubles>>(from), F64);
}

template <class T>
HP_INLINE double load_double(const char* from) {
  T value;
  __builtin_memcpy(&value, from, sizeof(value));
  return static_cast<double>(value);
}

// Sums that go on from block to block.
struct DotLanes {
  F64 aa[kUnits], ab[kUnits], bb[kUnits];
  // Of the elements after the last eight, in scalars: GCC 12 aligns vectors on the stack too little
  // when AddressSanitizer moves it (bug 110027).
  DotProducts rest;

  HP_INLINE static double sum(const F64* lanes) {
    const auto lane = [lanes](std::size_t i) { return lanes[i / kDoubles][i % kDoubles]; };
    return ((lane(0) + lane(1)) + (lane(2) + lane(3))) +
           ((lane(4) + lane(5)) + (lane(6) + lane(7)));
  }
  HP_INLINE DotProducts sums() const {
    return {sum(aa) + rest.aa, sum(ab) + rest.ab, sum(bb) + rest.bb};
  }
};

template <class T>
HP_INLINE void add_dots(const char* a, const char* b, std::size_t count, DotLanes* lanes) {
  DotLanes sums = *lanes;
  std::size_t left = count;
  for (; left >= kAdasumLanes; left -= kAdasumLanes) {
#pragma GCC unroll 4
    for (std::size_t u = 0; u < kUnits; ++u) {
      const F64 x = load_doubles<T>(a);
      const F64 y = load_doubles<T>(b);
      sums.aa[u] += x * x;
      sums.ab[u] += x * y;
      sums.bb[u] += y * y;
      a += kDoubles * sizeof(T);
      b += kDoubles * sizeof(T);
    }
  }
  for (; left > 0; --left, a += sizeof(T), b += sizeof(T)) {
    const double x = load_double<T>(a);
    const double y = load_double<T>(b);
    sums.rest.aa += x * x;
    sums.rest.ab += x * y;
    sums.rest.bb += y * y;
  }
  *lanes = sums;
}

// A NaN is the positive quiet one without payload, as from the reductions.
template <class T>
HP_INLINE void blend_range(char* dst, const char* a, const char* b, std::size_t count, double of_a,
                           double of_b) {
  std::size_t left = count;
  constexpr std::size_t kStep = kDoubles * sizeof(T);
  for (; left >= kDoubles; left -= kDoubles, a += kStep, b += kStep, dst += kStep) {
    F64 v = load_doubles<T>(a) * of_a + load_doubles<T>(b) * of_b;
    v = v == v ? v : F64{} + quiet_nan<double>();
    store_vector(dst, __builtin_convertvector(v, Vector<T, kDoubles>));
  }
  for (; left > 0; --left, a += sizeof(T), b += sizeof(T), dst += sizeof(T)) {
    double v = load_double<T>(a) * of_a + load_double<T>(b) * of_b;
    v = v == v ? v : quiet_nan<double>();
    const T value = static_cast<T>(v);
    __builtin_memcpy(dst, &value, sizeof(value));
  }
}

template <class T>
DotProducts dots(const void* a, const void* b, std::size_t count) {
  DotLanes lanes{};
  add_dots<T>(static_cast<const char*>(a), static_cast<const char*>(b), count, &lanes);
  return lanes.sums();
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
  return lanes.sums();
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
