// A reference implementation of the CPU kernels, one element at a time and as simple as possible.
// Conversions calculate with values instead of bits, so that they share no mistake with the
// kernels.
#pragma once

#include <algorithm>
#include <cmath>
#include <complex>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "device/cpu/kernels.h"

namespace horoplug::reference {

__extension__ typedef __int128 Int128;
__extension__ typedef unsigned __int128 UInt128;

template <class T>
T load(const void* base, std::size_t index) {
  T value;
  std::memcpy(&value, static_cast<const char*>(base) + index * sizeof(T), sizeof(T));
  return value;
}

template <class T>
void store(void* base, std::size_t index, T value) {
  std::memcpy(static_cast<char*>(base) + index * sizeof(T), &value, sizeof(T));
}

inline std::uint32_t bits_of(float f) { return load<std::uint32_t>(&f, 0); }
inline float float_of(std::uint32_t bits) { return load<float>(&bits, 0); }

inline float from_f16(std::uint16_t h) {
  const int exponent = (h >> 10) & 31;
  const int mantissa = h & 0x3ff;
  if (exponent == 31 && mantissa != 0) {  // quiet, the payload in the upper bits
    return float_of((h & 0x8000u) << 16 | 0x7fc00000u | static_cast<std::uint32_t>(mantissa) << 13);
  }
  double value = std::ldexp(mantissa, -24);
  if (exponent == 31) value = std::numeric_limits<double>::infinity();
  if (exponent > 0 && exponent < 31) value = std::ldexp(1024 + mantissa, exponent - 25);
  return static_cast<float>((h & 0x8000) ? -value : value);
}

inline std::uint16_t to_f16(float f) {
  const auto sign = static_cast<std::uint16_t>(bits_of(f) >> 16 & 0x8000);
  if (std::isnan(f)) {
    return static_cast<std::uint16_t>(sign | 0x7e00 | (bits_of(f) >> 13 & 0x3ff));
  }
  const double value = std::fabs(static_cast<double>(f));
  if (value >= 65520) return sign | 0x7c00;
  // In units of the last place; rounding up into the next binade carries into the exponent as it
  // should.
  const int exponent = value < 0x1p-14 ? -14 : std::ilogb(value);
  const int units = static_cast<int>(std::nearbyint(std::ldexp(value, 10 - exponent)));
  return static_cast<std::uint16_t>(sign + ((exponent + 14) << 10) + units);
}

inline float from_bf16(std::uint16_t h) { return float_of(static_cast<std::uint32_t>(h) << 16); }

inline std::uint16_t to_bf16(float f) {
  const std::uint32_t bits = bits_of(f);
  const auto down = static_cast<std::uint16_t>(bits >> 16);
  if (std::isnan(f)) return down | 0x40;
  if (std::isinf(f)) return down;
  const auto up = static_cast<std::uint16_t>(down + 1);
  const double value = std::fabs(static_cast<double>(f));
  const double below = value - std::fabs(static_cast<double>(from_bf16(down)));
  const bool overflows = std::isinf(from_bf16(up));
  const double above =
      (overflows ? 0x1p128 : std::fabs(static_cast<double>(from_bf16(up)))) - value;
  if (below == above) return (down & 1) ? up : down;
  return below < above ? down : up;
}

// 8-bit floats. kMantissa: the number of mantissa bits; kFinite: the format has no infinities and
// one NaN of each sign.
template <int kMantissa, bool kFinite>
struct Float8Bits {
  static constexpr int kBias = (1 << (6 - kMantissa)) - 1;
  static constexpr int kSteps = 1 << kMantissa;
  static constexpr int kTop = 0x7f / kSteps;  // the greatest exponent field
  static constexpr int kNan = kFinite ? 0x7f : kTop * kSteps + kSteps / 2;

  static float get(std::uint8_t byte) {
    const int exponent = (byte & 0x7f) / kSteps, mantissa = byte % kSteps;
    double value = std::ldexp(kSteps + mantissa, exponent - kBias - kMantissa);
    if (exponent == 0) value = std::ldexp(mantissa, 1 - kBias - kMantissa);
    if (!kFinite && exponent == kTop) value = std::numeric_limits<double>::infinity();
    if (kFinite ? (byte & 0x7f) == 0x7f : exponent == kTop && mantissa != 0) {
      value = std::numeric_limits<double>::quiet_NaN();
    }
    return static_cast<float>((byte & 0x80) ? -value : value);
  }
  static std::uint8_t put(float f) {
    const int sign = bits_of(f) >> 24 & 0x80;
    if (std::isnan(f)) return static_cast<std::uint8_t>(sign | kNan);
    const double value = std::fabs(static_cast<double>(f));
    const int beyond = kFinite ? 0x7f : kTop * kSteps;
    int result = beyond;
    if (!std::isinf(value)) {
      const int least = 1 - kBias;
      const int exponent = value < std::ldexp(1.0, least) ? least : std::ilogb(value);
      const double units = std::nearbyint(std::ldexp(value, kMantissa - exponent));
      // Rounding up into the next binade carries into the exponent as it should.
      if (exponent < 100) {
        result = std::min(beyond, (exponent - least) * kSteps + static_cast<int>(units));
      }
    }
    return static_cast<std::uint8_t>(sign | result);
  }
};

// Element types: `Value` is the type to calculate with, get() and put() convert from and to the
// stored format. put() stores every NaN as the positive quiet NaN.
struct F16 {
  using Value = float;
  static float get(const void* p, std::size_t i) { return from_f16(load<std::uint16_t>(p, i)); }
  static void put(void* p, std::size_t i, float v) {
    store(p, i, std::isnan(v) ? std::uint16_t{0x7e00} : to_f16(v));
  }
};
struct BF16 {
  using Value = float;
  static float get(const void* p, std::size_t i) { return from_bf16(load<std::uint16_t>(p, i)); }
  static void put(void* p, std::size_t i, float v) {
    store(p, i, std::isnan(v) ? std::uint16_t{0x7fc0} : to_bf16(v));
  }
};
template <int kMantissa, bool kFinite>
struct F8 {
  using Value = float;
  using Bits = Float8Bits<kMantissa, kFinite>;
  static float get(const void* p, std::size_t i) { return Bits::get(load<std::uint8_t>(p, i)); }
  static void put(void* p, std::size_t i, float v) {
    store(p, i, std::isnan(v) ? static_cast<std::uint8_t>(Bits::kNan) : Bits::put(v));
  }
};
template <class T>
struct Complex {
  using Value = std::complex<T>;
  static Value get(const void* p, std::size_t i) {
    return {load<T>(p, 2 * i), load<T>(p, 2 * i + 1)};
  }
  static void put(void* p, std::size_t i, Value v) {
    for (int part = 0; part < 2; ++part) {
      const T value = part == 0 ? v.real() : v.imag();
      store(p, 2 * i + part, std::isnan(value) ? std::numeric_limits<T>::quiet_NaN() : value);
    }
  }
};
template <class T>
inline constexpr bool kIsComplex = false;
template <class T>
inline constexpr bool kIsComplex<std::complex<T>> = true;
template <class T>
struct Number {
  using Value = T;
  static T get(const void* p, std::size_t i) { return load<T>(p, i); }
  static void put(void* p, std::size_t i, T v) {
    if constexpr (std::is_floating_point_v<T>) {
      if (std::isnan(v)) v = std::numeric_limits<T>::quiet_NaN();
    }
    store(p, i, v);
  }
};
struct Bool {
  using Value = bool;
  static bool get(const void* p, std::size_t i) { return load<std::uint8_t>(p, i) != 0; }
  static void put(void* p, std::size_t i, bool v) { store<std::uint8_t>(p, i, v ? 1 : 0); }
};

template <class T>
T combine(ReduceOp op, T a, T b) {
  const bool is_sum = op == ReduceOp::kSum || op == ReduceOp::kAverage;
  if constexpr (std::is_same_v<T, bool>) {
    return is_sum || op == ReduceOp::kMax ? a || b : a && b;
  } else if constexpr (kIsComplex<T>) {
    if (is_sum) return a + b;
    return {a.real() * b.real() - a.imag() * b.imag(), a.real() * b.imag() + a.imag() * b.real()};
  } else if constexpr (std::is_floating_point_v<T>) {
    if (is_sum) return a + b;
    if (op == ReduceOp::kProduct) return a * b;
    if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<T>::quiet_NaN();
    return op == ReduceOp::kMin ? (a < b ? a : b) : (a > b ? a : b);
  } else {
    if (is_sum) return static_cast<T>(static_cast<UInt128>(a) + static_cast<UInt128>(b));
    if (op == ReduceOp::kProduct)
      return static_cast<T>(static_cast<UInt128>(a) * static_cast<UInt128>(b));
    return op == ReduceOp::kMin ? (a < b ? a : b) : (a > b ? a : b);
  }
}

template <class T>
T finish_value(T value, Finish finish) {
  if (finish.is_identity() || std::is_same_v<T, bool>) return value;
  if constexpr (kIsComplex<T>) {
    return {finish_value(value.real(), finish), finish_value(value.imag(), finish)};
  } else if constexpr (std::is_floating_point_v<T>) {
    if (finish.multiply != 1.0) value *= static_cast<T>(finish.multiply);
    if (finish.divide != 1.0) value /= static_cast<T>(finish.divide);
    return value;
  } else {
    constexpr T kMin = std::numeric_limits<T>::min(), kMax = std::numeric_limits<T>::max();
    const double d = finish.divide;
    if (finish.multiply == 1.0 && d != 0 && d == std::trunc(d) && std::fabs(d) < 0x1p100) {
      const Int128 quotient = static_cast<Int128>(value) / static_cast<Int128>(d);
      return quotient < kMin ? kMin : quotient > kMax ? kMax : static_cast<T>(quotient);
    }
    const double scaled = static_cast<double>(value) * finish.multiply / d;
    if (std::isnan(scaled)) return 0;
    if (scaled <= static_cast<double>(kMin)) return kMin;
    if (scaled >= static_cast<double>(kMax))
      return kMax;  // kMax may have been rounded up: then equality is beyond it
    return static_cast<T>(scaled);
  }
}

// dtypes.def names a family for each dtype; <Family>Reference is its element type.
template <class T, int>
using UnsignedReference = Number<T>;
template <class T, int>
using SignedReference = Number<T>;
template <class T, int>
using BoolReference = Bool;
template <class T, int>
using FloatReference = Number<T>;
template <class T, int kMantissa>
using HalfReference = std::conditional_t<kMantissa == 7, BF16, F16>;
template <class T, int kMantissa>
using Float8Reference = F8<kMantissa, false>;
template <class T, int kMantissa>
using Float8FiniteReference = F8<kMantissa, true>;
template <class T, int>
using ComplexReference = Complex<T>;

// Calls f with the element type of `dtype`.
template <class Function>
void with_element(DType dtype, Function f) {
  switch (dtype) {
#define HP_DTYPE(code, NAME, Name, name, bytes, family, c_type, mantissa, ...) \
  case DType::k##Name:                                                         \
    return f(family##Reference<c_type, mantissa>{});
#include "horoplug/dtypes.def"
  }
}

inline void reduce(ReduceOp op, DType dtype, void* dst, const void* const* src, int sources,
                   std::size_t count, Finish finish) {
  if (sources == 1 && dtype != DType::kBool &&
      finish.is_identity()) {  // a plain copy, which keeps the bits of NaNs
    if (count != 0) std::memcpy(dst, src[0], count * dtype_size(dtype));
    return;
  }
  with_element(dtype, [&](auto element) {
    using E = decltype(element);
    for (std::size_t i = 0; i < count; ++i) {
      typename E::Value value = E::get(src[0], i);
      for (int s = 1; s < sources; ++s) value = combine(op, value, E::get(src[s], i));
      E::put(dst, i, finish_value(value, finish));
    }
  });
}

}  // namespace horoplug::reference
