// Vectors as wide as the instruction set this file is compiled for, and the conversions of 16-bit
// floats on them.
//
// Included, through kernels_impl.h, by one source file per instruction set. Nothing that is
// compiled with wider instructions may be visible to the linker, or it could be chosen for a
// program that runs on a lesser processor. Therefore all code is in an unnamed namespace, and none
// of it calls inline functions of the standard library.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define HP_INLINE [[gnu::always_inline]] inline

namespace horoplug {
namespace {

#if defined(__AVX512F__)
constexpr std::size_t kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr std::size_t kVectorBytes = 32;
#else
constexpr std::size_t kVectorBytes = 16;
#endif

// GCC drops a vector_size attribute whose argument depends on a template parameter from an alias,
// but not from a member typedef.
template <class T, std::size_t kLanes>
struct VectorOf {
  typedef T type __attribute__((vector_size(kLanes * sizeof(T))));
};
template <class T, std::size_t kLanes = kVectorBytes / sizeof(T)>
using Vector = typename VectorOf<T, kLanes>::type;

// memcpy, because tensors need not be aligned and their bytes are seen as different types.
template <class V>
HP_INLINE V load_vector(const char* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof(v));
  return v;
}
template <class V>
HP_INLINE void store_vector(char* to, V v) {
  __builtin_memcpy(to, &v, sizeof(v));
}

using F32 = Vector<float>;
using U32 = Vector<std::uint32_t>;
using I32 = Vector<std::int32_t>;
using U16 = Vector<std::uint16_t, kVectorBytes / 4>;  // half as wide: as many lanes as F32

HP_INLINE U32 widen(U16 h) { return __builtin_convertvector(h, U32); }
HP_INLINE U16 narrow(U32 w) { return __builtin_convertvector(w, U16); }

// bfloat16 is the upper half of a float32. Rounding to nearest even happens in place; a NaN must be
// quiet and have few payload bits (the sum could overflow into an infinity).
HP_INLINE U32 round_to_bf16(F32 f) { return (U32)f + 0x7fff + (((U32)f >> 16) & 1); }

HP_INLINE F32 from_bf16(U16 h) { return (F32)(widen(h) << 16); }
// For any NaN: it keeps its upper payload bits and becomes quiet.
HP_INLINE U16 to_bf16(F32 f) {
  const U32 nan = (U32)f | 0x400000;
  return narrow((f == f ? round_to_bf16(f) : nan) >> 16);
}

#if defined(__AVX512F__)

// With a mask of ones, because GCC 12 warns about its own definition of the plain forms.
HP_INLINE F32 from_f16(U16 h) { return (F32)_mm512_maskz_cvtph_ps(0xffff, (__m256i)h); }
HP_INLINE U16 to_f16(F32 f) {
  return (U16)_mm512_maskz_cvtps_ph(0xffff, (__m512)f,
                                    _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

#elif defined(__F16C__)

HP_INLINE F32 from_f16(U16 h) { return (F32)_mm256_cvtph_ps((__m128i)h); }
HP_INLINE U16 to_f16(F32 f) {
  return (U16)_mm256_cvtps_ph((__m256)f, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

#elif defined(__aarch64__)

// Every processor of ARMv8 has these. In the modes in which Linux starts a program they give the
// same bits as F16C, NaN included.
HP_INLINE F32 from_f16(U16 h) { return (F32)vcvt_f32_f16((float16x4_t)h); }
HP_INLINE U16 to_f16(F32 f) { return (U16)vcvt_f16_f32((float32x4_t)f); }

#else
#define HP_SOFT_F16 1

// The same results as the F16C instructions, by integer arithmetic on the bits (in the lower halves
// of 32-bit lanes). Comparisons are signed because SSE2 has no others; the sign bit is off by then.
// No float32 subnormal is ever produced, so that flush-to-zero modes make no difference.
HP_INLINE F32 widened_from_f16(U32 wide) {
  const I32 magnitude = (I32)(wide & 0x7fff);
  const I32 shifted = magnitude << 13;
  const I32 normal = shifted + (112 << 23);  // float32's exponent bias is greater by 112
  const I32 subnormal = (I32)(__builtin_convertvector(magnitude, F32) * 0x1p-24f);
  const I32 infinity = shifted | 0x7f800000;
  const I32 nan = shifted | 0x7fc00000;
  I32 bits = magnitude < 0x0400 ? subnormal : normal;
  bits = magnitude >= 0x7c00 ? infinity : bits;
  bits = magnitude > 0x7c00 ? nan : bits;
  return (F32)((U32)bits | ((wide & 0x8000) << 16));
}

HP_INLINE U32 widened_to_f16(F32 f) {
  const U32 sign = ((U32)f >> 16) & 0x8000;
  const I32 magnitude = (I32)((U32)f & 0x7fffffff);
  const U32 rounded = (U32)magnitude - (112u << 23) + 0xfff + (((U32)magnitude >> 13) & 1);
  const I32 normal = (I32)rounded >> 13;
  // A unit in the last place of 0.5f is float16's smallest subnormal: the addition rounds as
  // wanted.
  const I32 subnormal = (I32)((U32)((F32)magnitude + 0.5f) - 0x3f000000);
  const I32 infinity = I32{} + 0x7c00;
  const I32 nan = ((magnitude >> 13) & 0x3ff) | 0x7e00;
  I32 bits = magnitude < 0x38800000 ? subnormal : normal;  // 2^-14, the smallest normal float16
  bits = magnitude >= 0x477ff000 ? infinity : bits;  // 65520, the least that rounds to infinity
  bits = magnitude > 0x7f800000 ? nan : bits;
  return (U32)bits | sign;
}

HP_INLINE F32 from_f16(U16 h) { return widened_from_f16(widen(h)); }
HP_INLINE U16 to_f16(F32 f) { return narrow(widened_to_f16(f)); }

#endif

// Floats of 8 bits, in the lowest byte of 32-bit lanes. kFinite: there are no infinities, and NaN
// has all bits set. Comparisons are signed, and no float32 subnormal is produced, as above.
template <int kMantissa, bool kFinite>
struct Float8Format {
  static constexpr int kBias = (1 << (6 - kMantissa)) - 1;
  static constexpr int kShift = 23 - kMantissa;        // from these mantissas to float32's
  static constexpr int kRebias = (127 - kBias) << 23;  // likewise of exponents
  static constexpr int kLeastNormal = 1 << kMantissa;
  static constexpr int kInfinity = 0x7f & ~(kLeastNormal - 1);
  static constexpr int kNan = kFinite ? 0x7f : kInfinity | kLeastNormal >> 1;
  // 2^(1 - bias - mantissa), the smallest subnormal, is the unit in the last place of kMagic.
  static constexpr float kUnit = 1.0f / (1 << (kBias + kMantissa - 1));
  static constexpr float kMagic = kUnit * (1 << 23);

  HP_INLINE static F32 widen(U32 byte) {
    const I32 magnitude = (I32)(byte & 0x7f);
    const I32 shifted = magnitude << kShift;
    const I32 subnormal = (I32)(__builtin_convertvector(magnitude, F32) * kUnit);
    I32 bits = magnitude < kLeastNormal ? subnormal : shifted + kRebias;
    if constexpr (kFinite) {
      bits = magnitude == 0x7f ? I32{} + 0x7fc00000 : bits;
    } else {
      bits = magnitude >= kInfinity ? shifted | 0x7f800000 : bits;
      bits = magnitude > kInfinity ? shifted | 0x7fc00000 : bits;
    }
    return (F32)((U32)bits | (byte & 0x80) << 24);
  }

  // What is too large becomes infinity, or NaN.
  HP_INLINE static U32 narrow(F32 f) {
    const U32 sign = (U32)f >> 24 & 0x80;
    const I32 magnitude = (I32)((U32)f & 0x7fffffff);
    // Unsigned, because GCC may add in another order, in which a NaN's bits would overflow.
    const U32 odd = (U32)magnitude >> kShift & 1;
    const U32 rounded = (U32)magnitude - kRebias + ((1 << (kShift - 1)) - 1) + odd;
    const I32 normal = (I32)rounded >> kShift;
    const I32 subnormal = (I32)((F32)magnitude + kMagic) - (I32)(F32{} + kMagic);
    I32 bits = magnitude < kRebias + (1 << 23) ? subnormal : normal;
    if constexpr (kFinite) {
      bits = bits > 0x7e ? I32{} + kNan : bits;
    } else {
      bits = bits > kInfinity ? I32{} + kInfinity : bits;
    }
    bits = magnitude > 0x7f800000 ? I32{} + kNan : bits;
    return (U32)bits | sign;
  }
};

}  // namespace
}  // namespace horoplug
