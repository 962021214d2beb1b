// What happens to a value before it is stored: Finish of device/cpu/kernels.h, by the same
// arithmetic in the same order.
#pragma once

#include "device/cuda/kernels/elements.h"

namespace horoplug::cuda {

template <class T>
struct Limits {
  static constexpr bool kSigned = static_cast<T>(-1) < static_cast<T>(1);
  static constexpr T kMax = static_cast<T>(~u64{0} >> (64 - 8 * sizeof(T) + (kSigned ? 1 : 0)));
  static constexpr T kMin = static_cast<T>(kSigned ? -kMax - 1 : 0);
};

// Truncates, saturates, and makes 0 of NaN. kLimit, the first value above the range, is exact in
// float64 for all types.
template <class T>
HP_DEVICE T to_integer(double v) {
  constexpr T kHalf = Limits<T>::kMax / 2 + 1;
  constexpr double kLimit = 2.0 * static_cast<double>(kHalf);
  constexpr double kLow = static_cast<double>(Limits<T>::kMin);
  if (v >= kLimit) return Limits<T>::kMax;
  if (v > kLow) return static_cast<T>(v);
  return v <= kLow ? Limits<T>::kMin : T{0};
}

// The value is sign and magnitude, so that the most negative integer needs no special case.
template <class T>
HP_DEVICE T with_sign(u64 magnitude, bool negative) {
  if (negative) return Limits<T>::kSigned ? static_cast<T>(0 - magnitude) : T{0};
  return magnitude > static_cast<u64>(Limits<T>::kMax) ? Limits<T>::kMax
                                                       : static_cast<T>(magnitude);
}

template <class T>
HP_DEVICE T divided(T x, const FinishArgs& finish) {
  const bool minus = Limits<T>::kSigned && static_cast<i64>(x) < 0;
  const u64 bits = static_cast<u64>(x);
  const u64 dividend = minus ? 0 - bits : bits;
  u64 quotient = 0;
  if (finish.mode == kExactShift) quotient = dividend >> finish.divisor;
  if (finish.mode == kExactDivide) quotient = dividend / finish.divisor;
  return with_sign<T>(quotient, minus != (finish.negative != 0));
}

template <class E>
HP_DEVICE typename E::Value finished(typename E::Value v, const FinishArgs& finish) {
  using V = typename E::Value;
  if constexpr (!E::kScales) {
    return v;
  } else if constexpr (E::kFloating) {
    using Scalar = typename E::Scalar;
    const Scalar multiply = static_cast<Scalar>(finish.multiply);
    const Scalar divide = static_cast<Scalar>(finish.divide);
    if (finish.mode == kMultiply) v = v * multiply * divide;
    if (finish.mode == kDivide) v = v * multiply / divide;
    return one_nan(v);
  } else {
    if (finish.mode == kNoFinish) return v;
    if constexpr (sizeof(V) == 8) {
      if (finish.mode != kThroughFloat) return divided<V>(v, finish);
    }
    return to_integer<V>(static_cast<double>(v) * finish.multiply / finish.divide);
  }
}

}  // namespace horoplug::cuda
