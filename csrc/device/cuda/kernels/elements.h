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

template <class T, class U>
struct Integer : Raw<T> {
  using Unsigned = U;  // wraps around
  static constexpr bool kScales = true;
};
using U8 = Integer<u8, u32>;
using I8 = Integer<i8, u32>;
using U16 = Integer<u16, u32>;
using I16 = Integer<i16, u32>;
using U32 = Integer<u32, u32>;
using I32 = Integer<i32, u32>;
using U64 = Integer<u64, u64>;
using I64 = Integer<i64, u64>;

struct Bool : Raw<u8> {
  static constexpr bool kBool = true;
  HP_DEVICE static Value get(Stored s) { return s != 0 ? 1 : 0; }
};

template <class T>
struct Float : Raw<T> {
  using Unsigned = T;
  static constexpr bool kFloating = true, kScales = true;
};
using F32 = Float<float>;
using F64 = Float<double>;

// Stored in 16 bits, computed in float32. A NaN keeps its upper payload bits and becomes quiet.
struct F16 : F32 {
  using Stored = u16;
  HP_DEVICE static Value get(Stored h) {
    const u32 nan = (h & 0x8000u) << 16 | 0x7fc00000 | (h & 0x3ffu) << 13;
    return (h & 0x7fff) > 0x7c00 ? bits_as<float>(nan) : widen_f16(h);
  }
  HP_DEVICE static Stored put(Value f) {
    const u32 bits = bits_as<u32>(f);
    const u32 nan = (bits >> 16 & 0x8000) | 0x7e00 | (bits >> 13 & 0x3ff);
    return f == f ? narrow_f16(f) : static_cast<u16>(nan);
  }
};
struct BF16 : F32 {
  using Stored = u16;
  HP_DEVICE static Value get(Stored h) { return bits_as<float>(static_cast<u32>(h) << 16); }
  HP_DEVICE static Stored put(Value f) {
    const u32 bits = bits_as<u32>(f);
    const u32 rounded = bits + 0x7fff + (bits >> 16 & 1);
    return static_cast<u16>((f == f ? rounded : bits | 0x400000) >> 16);
  }
};

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
