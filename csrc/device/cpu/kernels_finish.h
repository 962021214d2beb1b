// What `Finish` means for each kind of element: scaling of float vectors, and of integers one at a
// time. Compiled once per instruction set, see kernels_vector.h for the rules of such code.
#pragma once

#include "device/cpu/kernels.h"
#include "device/cpu/kernels_vector.h"

namespace horoplug {
namespace {

template <class S>
constexpr S quiet_nan() {
  return static_cast<S>(__builtin_nanf(""));
}

struct NoFinish {
  template <class V>
  HP_INLINE V operator()(V v) const {
    return v;
  }
};

// Multiplying and dividing by 1 changes nothing but NaNs, and those are replaced afterwards anyway.
template <class S>
struct MultiplyTwice {
  S multiply, reciprocal;
  template <class V>
  HP_INLINE V operator()(V v) const {
    return v * multiply * reciprocal;
  }
};

template <class S>
struct MultiplyDivide {
  S multiply, divide;
  template <class V>
  HP_INLINE V operator()(V v) const {
    return v * multiply / divide;
  }
};

// Powers of two, as most world sizes are: multiplying by the reciprocal gives the same bits as
// dividing, and is faster.
inline bool has_exact_reciprocal(float divide) {
  const auto bits = __builtin_bit_cast(std::uint32_t, divide);
  const auto exponent = (bits >> 23) & 0xff;
  return (bits & 0x7fffff) == 0 && exponent >= 2 && exponent <= 252;
}
inline bool has_exact_reciprocal(double divide) {
  const auto bits = __builtin_bit_cast(std::uint64_t, divide);
  const auto exponent = (bits >> 52) & 0x7ff;
  return (bits & 0xfffffffffffff) == 0 && exponent >= 2 && exponent <= 2044;
}

template <class T>
struct IntegerLimits {
  static constexpr bool kSigned = static_cast<T>(-1) < 0;
  static constexpr T kMax =
      static_cast<T>(~std::uint64_t{0} >> (64 - 8 * sizeof(T) + (kSigned ? 1 : 0)));
  static constexpr T kMin = static_cast<T>(kSigned ? -kMax - 1 : 0);
};

// Truncates, saturates, and makes 0 of NaN. kLimit, the first value above the range, is exact in
// float64 for all types.
template <class T>
HP_INLINE T to_integer(double v) {
  using Limits = IntegerLimits<T>;
  constexpr T kHalf = Limits::kMax / 2 + 1;
  constexpr double kLimit = 2.0 * static_cast<double>(kHalf);
  constexpr double kLow = static_cast<double>(Limits::kMin);
  if constexpr (sizeof(T) < 8) {  // no branches: this form vectorises
    v = v == v ? v : 0.0;
    v = v > kLow ? v : kLow;
    v = v < kLimit - 1 ? v : kLimit - 1;
    return static_cast<T>(static_cast<std::int64_t>(v));
  } else {
    if (v >= kLimit) return Limits::kMax;
    if (v > kLow) return static_cast<T>(v);
    return v <= kLow ? Limits::kMin : T{0};
  }
}

// The value is sign and magnitude, so that the most negative integer needs no special case.
template <class T>
HP_INLINE T with_sign(std::uint64_t magnitude, bool negative) {
  using Limits = IntegerLimits<T>;
  if (negative) return Limits::kSigned ? static_cast<T>(0 - magnitude) : T{0};
  return magnitude > static_cast<std::uint64_t>(Limits::kMax) ? Limits::kMax
                                                              : static_cast<T>(magnitude);
}

template <class T, class Function>
HP_INLINE void map_integers(char* dst, const char* src, std::size_t count, Function function) {
  // dst is either equal to src or does not overlap it. Without the pragma the compiler would check
  // for overlap at run time, and would not vectorise the case dst == src.
#if defined(__clang__)
#pragma clang loop vectorize(assume_safety)
#else
#pragma GCC ivdep
#endif
  for (std::size_t i = 0; i < count; ++i) {
    T x;
    __builtin_memcpy(&x, src + i * sizeof(T), sizeof(T));
    x = function(x);
    __builtin_memcpy(dst + i * sizeof(T), &x, sizeof(T));
  }
}

template <class T>
void finish_integers(char* dst, const char* src, std::size_t count, Finish finish) {
  const double multiply = finish.multiply;
  const double divide = finish.divide;
  if constexpr (sizeof(T) == 8) {
    // float64 does not hold these values exactly, so that a division alone is done in integers. For
    // narrower types the float64 quotient of two integers, truncated, is the exact one.
    const bool negative = divide < 0;
    const double magnitude = negative ? -divide : divide;
    const bool beyond = magnitude >= 0x1p64;  // every quotient is 0
    const std::uint64_t divisor =
        beyond || !(magnitude >= 1) ? 0 : static_cast<std::uint64_t>(magnitude);
    if (multiply == 1.0 &&
        (beyond || (divisor != 0 && static_cast<double>(divisor) == magnitude))) {
      const bool power_of_two = (divisor & (divisor - 1)) == 0;
      const int shift = power_of_two && !beyond ? __builtin_ctzll(divisor) : 0;
      map_integers<T>(dst, src, count, [=](T x) {
        const bool minus = x < 0;
        const std::uint64_t bits = static_cast<std::uint64_t>(x);
        const std::uint64_t dividend = minus ? 0 - bits : bits;
        const std::uint64_t quotient = beyond         ? 0
                                       : power_of_two ? dividend >> shift
                                                      : dividend / divisor;
        return with_sign<T>(quotient, minus != negative);
      });
      return;
    }
  }
  map_integers<T>(dst, src, count,
                  [=](T x) { return to_integer<T>(static_cast<double>(x) * multiply / divide); });
}

}  // namespace
}  // namespace horoplug
