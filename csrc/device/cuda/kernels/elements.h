// Element types: how they are stored, the type that they are computed in, and what Sum, Product,
// Min and Max mean for them. The contract is device/cpu/kernels.h.
#pragma once

#include "device/cuda/kernels/target.h"

namespace horoplug::cuda {

template <class To, class From>
HP_DEVICE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "not the same bits");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

// The one NaN of all results: positive, quiet, without payload.
HP_DEVICE float one_nan(float v) { return v == v ? v : bits_as<float>(u32{0x7fc00000}); }
HP_DEVICE double one_nan(double v) { return v == v ? v : bits_as<double>(u64{0x7ff8000000000000}); }
template <class T>
HP_DEVICE T one_nan(T v) {
  return v;
}

template <class T>
struct Complex {
  T re, im;
};
template <class T>
HP_DEVICE Complex<T> operator+(Complex<T> a, Complex<T> b) {
  return {a.re + b.re, a.im + b.im};
}
template <class T>
HP_DEVICE Complex<T> operator*(Complex<T> a, Complex<T> b) {
  return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
}
template <class T>
HP_DEVICE Complex<T> operator*(Complex<T> a, T factor) {
  return {a.re * factor, a.im * factor};
}
template <class T>
HP_DEVICE Complex<T> operator/(Complex<T> a, T divisor) {
  return {a.re / divisor, a.im / divisor};
}
template <class T>
HP_DEVICE Complex<T> one_nan(Complex<T> v) {
  return {one_nan(v.re), one_nan(v.im)};
}

// Nothing but bits, to be copied.
template <class T>
struct Raw {
  using Stored = T;
  using Value = T;
  static constexpr bool kFloating = false, kBool = false, kScales = false;
  HP_DEVICE static Value get(Stored s) { return s; }
  HP_DEVICE static Stored put(Value v) { return v; }
};
using Raw8 = Raw<u8>;
using Raw16 = Raw<u16>;
using Raw32 = Raw<u32>;
using Raw64 = Raw<u64>;
using Raw128 = Raw<Complex<u64>>;

// A template <Family>Element for each family of dtypes.def.

template <class T, class U>
struct Integer : Raw<T> {
  using Unsigned = U;  // wraps around
  static constexpr bool kScales = true;
};
template <bool kWide>
struct UnsignedOf {
  using Type = u32;
};
template <>
struct UnsignedOf<true> {
  using Type = u64;
};
template <class T, int>
using UnsignedElement = Integer<T, typename UnsignedOf<sizeof(T) == 8>::Type>;
template <class T, int kMantissa>
using SignedElement = UnsignedElement<T, kMantissa>;

template <class T, int>
struct BoolElement : Raw<T> {
  using typename Raw<T>::Value;
  using typename Raw<T>::Stored;
  static constexpr bool kBool = true;
  HP_DEVICE static Value get(Stored s) { return s != 0 ? 1 : 0; }
};

template <class T, int>
struct FloatElement : Raw<T> {
  using Unsigned = T;
  using Scalar = T;  // of factors
  static constexpr bool kFloating = true, kScales = true;
};

// Stored in 16 bits, computed in float32. A NaN keeps its upper payload bits and becomes quiet.
template <class T, int kMantissa>
struct HalfElement;
template <class T>
struct HalfElement<T, 10> : FloatElement<float, 23> {  // float16
  using Stored = T;
  HP_DEVICE static float get(T h) {
    const u32 nan = (h & 0x8000u) << 16 | 0x7fc00000 | (h & 0x3ffu) << 13;
    return (h & 0x7fff) > 0x7c00 ? bits_as<float>(nan) : widen_f16(h);
  }
  HP_DEVICE static T put(float f) {
    const u32 bits = bits_as<u32>(f);
    const u32 nan = (bits >> 16 & 0x8000) | 0x7e00 | (bits >> 13 & 0x3ff);
    return f == f ? narrow_f16(f) : static_cast<T>(nan);
  }
};
template <class T>
struct HalfElement<T, 7> : FloatElement<float, 23> {  // bfloat16
  using Stored = T;
  HP_DEVICE static float get(T h) { return bits_as<float>(static_cast<u32>(h) << 16); }
  HP_DEVICE static T put(float f) {
    const u32 bits = bits_as<u32>(f);
    const u32 rounded = bits + 0x7fff + (bits >> 16 & 1);
    return static_cast<T>((f == f ? rounded : bits | 0x400000) >> 16);
  }
};

// Stored in 8 bits, computed in float32. kFinite: there are no infinities, and NaN has all bits
// set. A NaN is stored without payload.
template <class T, int kMantissa, bool kFinite>
struct AnyFloat8 : FloatElement<float, 23> {
  using Stored = T;
  static constexpr u32 kBias = (1u << (6 - kMantissa)) - 1;
  static constexpr u32 kShift = 23 - kMantissa;        // from these mantissas to float32's
  static constexpr u32 kRebias = (127 - kBias) << 23;  // likewise of exponents
  static constexpr u32 kLeastNormal = 1u << kMantissa;
  static constexpr u32 kInfinity = 0x7fu & ~(kLeastNormal - 1);
  static constexpr u32 kNan = kFinite ? 0x7fu : kInfinity | kLeastNormal >> 1;
  // 2^(1 - bias - mantissa), the smallest subnormal, is the unit in the last place of kMagic.
  static constexpr float kUnit = 1.0f / (1u << (kBias + kMantissa - 1));
  static constexpr float kMagic = kUnit * (1u << 23);

  HP_DEVICE static float get(T byte) {
    const u32 magnitude = byte & 0x7fu, shifted = magnitude << kShift;
    u32 bits = magnitude < kLeastNormal ? bits_as<u32>(static_cast<float>(magnitude) * kUnit)
                                        : shifted + kRebias;
    if (kFinite) {
      if (magnitude == 0x7f) bits = 0x7fc00000;
    } else {
      if (magnitude >= kInfinity) bits = shifted | 0x7f800000;
      if (magnitude > kInfinity) bits = shifted | 0x7fc00000;
    }
    return bits_as<float>(bits | (byte & 0x80u) << 24);
  }
  // What is too large becomes infinity, or NaN.
  HP_DEVICE static T put(float f) {
    const u32 sign = bits_as<u32>(f) >> 24 & 0x80, magnitude = bits_as<u32>(f) & 0x7fffffff;
    u32 bits = 0;
    if (magnitude < kRebias + (1u << 23)) {
      const float magic = kMagic;
      bits = bits_as<u32>(bits_as<float>(magnitude) + magic) - bits_as<u32>(magic);
    } else {
      const u32 odd = magnitude >> kShift & 1;
      bits = (magnitude - kRebias + ((1u << (kShift - 1)) - 1) + odd) >> kShift;
    }
    if (kFinite) {
      if (bits > 0x7e) bits = kNan;
    } else {
      if (bits > kInfinity) bits = kInfinity;
    }
    if (magnitude > 0x7f800000) bits = kNan;
    return static_cast<T>(bits | sign);
  }
};
template <class T, int kMantissa>
using Float8Element = AnyFloat8<T, kMantissa, false>;
template <class T, int kMantissa>
using Float8FiniteElement = AnyFloat8<T, kMantissa, true>;

template <class T, int>
struct ComplexElement : Raw<Complex<T>> {
  using Unsigned = Complex<T>;
  using Scalar = T;
  static constexpr bool kFloating = true, kScales = true;
};

#define HP_DTYPE(code, NAME, Name, name, bytes, family, c_type, mantissa, ...) \
  using Name = family##Element<c_type, mantissa>;
#include "horoplug/dtypes.def"

// Operators.

struct Sum {
  template <class E>
  HP_DEVICE static typename E::Value apply(typename E::Value a, typename E::Value b) {
    using V = typename E::Value;
    if constexpr (E::kBool) {
      return a | b;
    } else {
      using U = typename E::Unsigned;
      return static_cast<V>(static_cast<U>(a) + static_cast<U>(b));
    }
  }
};

struct Product {
  template <class E>
  HP_DEVICE static typename E::Value apply(typename E::Value a, typename E::Value b) {
    using V = typename E::Value;
    if constexpr (E::kBool) {
      return a & b;
    } else {
      using U = typename E::Unsigned;
      return static_cast<V>(static_cast<U>(a) * static_cast<U>(b));
    }
  }
};

// A comparison with NaN is false, which selects b; the second selection is for a.
struct Min {
  template <class E>
  HP_DEVICE static typename E::Value apply(typename E::Value a, typename E::Value b) {
    const typename E::Value least = a < b ? a : b;
    return a == a ? least : a;
  }
};

struct Max {
  template <class E>
  HP_DEVICE static typename E::Value apply(typename E::Value a, typename E::Value b) {
    const typename E::Value greatest = a > b ? a : b;
    return a == a ? greatest : a;
  }
};

}  // namespace horoplug::cuda
