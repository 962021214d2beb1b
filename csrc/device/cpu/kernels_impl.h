// The kernels themselves: element types, operators, and the loops over them. Compiled once per
// instruction set, see kernels_vector.h for the rules of such code.
//
// A reduction reads every source once and writes the result once: a few vectors' worth of elements
// stay in registers while an inner loop goes over the sources. So the number of sources is no
// template parameter, and each element combines the sources in the order given, however the array
// is divided.
#pragma once

#include <type_traits>

#include "device/cpu/kernels.h"
#include "device/cpu/kernels_adasum.h"
#include "device/cpu/kernels_blocks.h"
#include "device/cpu/kernels_copy.h"
#include "device/cpu/kernels_finish.h"
#include "device/cpu/kernels_vector.h"

namespace horoplug {
namespace {

template <class From, class To, To (*kConvert)(From)>
void convert(void* dst, const void* src, std::size_t count) {
  constexpr std::size_t kLanes = sizeof(F32) / sizeof(float);
  char* to = static_cast<char*>(dst);
  const char* from = static_cast<const char*>(src);
  for (; count >= kLanes; count -= kLanes, from += sizeof(From), to += sizeof(To)) {
    store_vector(to, kConvert(load_vector<From>(from)));
  }
  if (count == 0) return;
  From in{};
  __builtin_memcpy(&in, from, count * (sizeof(From) / kLanes));
  const To out = kConvert(in);
  __builtin_memcpy(to, &out, count * (sizeof(To) / kLanes));
}

// Element types: a template <Family>Element for each family of dtypes.def. A unit is kBytes of a
// tensor, which become kParts vectors of type V for arithmetic; Wrap is V with wrap-around on
// overflow.

template <DType kType, class T, class Unsigned = T>
struct Plain {  // stored as it is computed
  static constexpr DType kDType = kType;
  static constexpr bool kFloating = static_cast<T>(0.5) != 0;
  static constexpr bool kBool = false, kComplex = false;
  static constexpr std::size_t kSize = sizeof(T);
  static constexpr std::size_t kBytes = kVectorBytes;
  static constexpr int kParts = 1;
  using Scalar = T;
  using V = Vector<T>;
  using Wrap = Vector<Unsigned>;
  HP_INLINE static void load(const char* from, V* v) { *v = load_vector<V>(from); }
  HP_INLINE static void store(char* to, const V* v) { store_vector(to, *v); }
};

template <DType kType, class T, int>
using UnsignedElement = Plain<kType, T>;
template <DType kType, class T, int>
using SignedElement = Plain<kType, T, std::make_unsigned_t<T>>;
template <DType kType, class T, int>
using FloatElement = Plain<kType, T>;

template <DType kType, class T, int>
struct BoolElement : Plain<kType, T> {
  static constexpr bool kBool = true;
  using V = Vector<T>;
  HP_INLINE static void load(const char* from, V* v) { *v = (V)(load_vector<V>(from) != 0) & 1; }
};

template <DType kType, int kPartsPerUnit>
struct Half {  // stored in 16 bits, computed in float32
  static constexpr DType kDType = kType;
  static constexpr bool kFloating = true;
  static constexpr bool kBool = false, kComplex = false;
  static constexpr std::size_t kSize = 2;
  static constexpr std::size_t kBytes = kPartsPerUnit * sizeof(U16);
  static constexpr int kParts = kPartsPerUnit;
  using Scalar = float;
  using V = F32;
  using Wrap = F32;
};

template <DType kType, class T, int kMantissa>
struct HalfElement;

// bfloat16. Where widening is no part of the conversion, the even elements of a unit make one
// vector and the odd ones another: shifts and masks do that, while shuffles would cost more than
// the arithmetic.
template <DType kType, class T>
struct HalfElement<kType, T, 7> : Half<kType, 2> {
  static constexpr ConvertFn kFromFloat32 = convert<F32, U16, to_bf16>;
  static constexpr ConvertFn kToFloat32 = convert<U16, F32, from_bf16>;
  HP_INLINE static void load(const char* from, F32* v) {
    const U32 both = load_vector<U32>(from);
    v[0] = (F32)(both << 16);
    v[1] = (F32)(both & 0xffff0000);
  }
  // A NaN is the one that finished() makes, as round_to_bf16() needs it.
  HP_INLINE static void store(char* to, const F32* v) {
    store_vector(to, (round_to_bf16(v[0]) >> 16) | (round_to_bf16(v[1]) & 0xffff0000));
  }
};

// float16.
#if defined(HP_SOFT_F16)
constexpr int kFloat16Parts = 2;
#else
constexpr int kFloat16Parts = 1;
#endif
template <DType kType, class T>
struct HalfElement<kType, T, 10> : Half<kType, kFloat16Parts> {
  static constexpr ConvertFn kFromFloat32 = convert<F32, U16, to_f16>;
  static constexpr ConvertFn kToFloat32 = convert<U16, F32, from_f16>;
#if defined(HP_SOFT_F16)
  HP_INLINE static void load(const char* from, F32* v) {
    const U32 both = load_vector<U32>(from);
    v[0] = widened_from_f16(both & 0xffff);
    v[1] = widened_from_f16(both >> 16);
  }
  HP_INLINE static void store(char* to, const F32* v) {
    store_vector(to, widened_to_f16(v[0]) | (widened_to_f16(v[1]) << 16));
  }
#else
  HP_INLINE static void load(const char* from, F32* v) { *v = from_f16(load_vector<U16>(from)); }
  HP_INLINE static void store(char* to, const F32* v) { store_vector(to, to_f16(*v)); }
#endif
};

// Floats of 8 bits, computed in float32. Four vectors have the four bytes of each 32-bit lane.
template <DType kType, int kMantissa, bool kFinite>
struct Float8 {
  static constexpr DType kDType = kType;
  static constexpr bool kFloating = true;
  static constexpr bool kBool = false, kComplex = false;
  static constexpr std::size_t kSize = 1;
  static constexpr std::size_t kBytes = sizeof(U32);
  static constexpr int kParts = 4;
  using Scalar = float;
  using V = F32;
  using Wrap = F32;
  using Format = Float8Format<kMantissa, kFinite>;
  static void to_float32(void* dst, const void* src, std::size_t count) {
    convert_float8(
        dst, src, count,
        [](const char* from, char* to) {
          V v[kParts];
          load(from, v);
          for (std::size_t i = 0; i < kBytes; ++i) {
            const float value = v[i % 4][i / 4];
            __builtin_memcpy(to + i * sizeof value, &value, sizeof value);
          }
        },
        1, sizeof(float));
  }
  static void from_float32(void* dst, const void* src, std::size_t count) {
    convert_float8(
        dst, src, count,
        [](const char* from, char* to) {
          V v[kParts];
          for (std::size_t i = 0; i < kBytes; ++i) {
            float value;
            __builtin_memcpy(&value, from + i * sizeof value, sizeof value);
            v[i % 4][i / 4] = value;
          }
          store(to, v);
        },
        sizeof(float), 1);
  }
  HP_INLINE static void load(const char* from, V* v) {
    const U32 four = load_vector<U32>(from);
    for (int part = 0; part < kParts; ++part) v[part] = Format::widen(four >> (8 * part) & 0xff);
  }
  HP_INLINE static void store(char* to, const V* v) {
    U32 four = Format::narrow(v[0]);
    for (int part = 1; part < kParts; ++part) four |= Format::narrow(v[part]) << (8 * part);
    store_vector(to, four);
  }

 private:
  // Calls block(from, to) for so many elements at a time as a unit has.
  template <class Block>
  HP_INLINE static void convert_float8(void* dst, const void* src, std::size_t count, Block block,
                                       std::size_t read, std::size_t written) {
    char* to = static_cast<char*>(dst);
    const char* from = static_cast<const char*>(src);
    for (; count >= kBytes; count -= kBytes, from += kBytes * read, to += kBytes * written) {
      block(from, to);
    }
    if (count == 0) return;
    char in[kBytes * sizeof(float)] = {}, out[kBytes * sizeof(float)];
    __builtin_memcpy(in, from, count * read);
    block(in, out);
    __builtin_memcpy(to, out, count * written);
  }
};
template <DType kType, class T, int kMantissa>
using Float8Element = Float8<kType, kMantissa, false>;
template <DType kType, class T, int kMantissa>
using Float8FiniteElement = Float8<kType, kMantissa, true>;

// Real and imaginary parts alternate. Both are summed and scaled like floats.
template <DType kType, class T, int>
struct ComplexElement : Plain<kType, T> {
  static constexpr bool kComplex = true;
  static constexpr std::size_t kSize = 2 * sizeof(T);
};

// Operators.

struct Sum {
  template <class E>
  HP_INLINE static typename E::V apply(typename E::V a, typename E::V b) {
    if constexpr (E::kBool) return a | b;
    return (typename E::V)((typename E::Wrap)a + (typename E::Wrap)b);
  }
};

struct Product {
  template <class E>
  HP_INLINE static typename E::V apply(typename E::V a, typename E::V b) {
    if constexpr (E::kBool) return a & b;
    if constexpr (E::kComplex) return complex_product<E>(a, b);
    return (typename E::V)((typename E::Wrap)a * (typename E::Wrap)b);
  }

 private:
  template <class E>
  HP_INLINE static typename E::V complex_product(typename E::V a, typename E::V b) {
    // In vectors: from sums and differences of scalars GCC 12 makes fused multiply-adds, whatever
    // -ffp-contract says.
    typename E::V swapped, re, im, sign;
    for (std::size_t i = 0; i < E::kBytes / sizeof(typename E::Scalar); ++i) {
      swapped[i] = a[i ^ 1];
      re[i] = b[i & ~std::size_t{1}];
      im[i] = b[i | 1];
      sign[i] = i % 2 == 0 ? -1 : 1;
    }
    return a * re + swapped * im * sign;
  }
};

// A comparison with NaN is false, which selects b; the second selection is for a.
struct Min {
  template <class E>
  HP_INLINE static typename E::V apply(typename E::V a, typename E::V b) {
    const typename E::V least = a < b ? a : b;
    if constexpr (E::kFloating) return a == a ? least : a;
    return least;
  }
};

struct Max {
  template <class E>
  HP_INLINE static typename E::V apply(typename E::V a, typename E::V b) {
    const typename E::V greatest = a > b ? a : b;
    if constexpr (E::kFloating) return a == a ? greatest : a;
    return greatest;
  }
};

// The loop. `at` counts bytes; several units are in flight to hide latencies and the cost of the
// inner loop.

template <class E, class Finisher>
HP_INLINE typename E::V finished(typename E::V v, Finisher finish) {
  v = finish(v);
  // When both operands are NaN, which one's payload survives depends on the order that the compiler
  // gave them. One fixed NaN keeps the tables (and processors) alike.
  if constexpr (E::kFloating) {
    using V = typename E::V;
    v = v == v ? v : V{} + quiet_nan<typename E::Scalar>();
  }
  return v;
}

template <class E, class Op, int kUnits, class Finisher>
HP_INLINE void reduce_step(char* dst, const void* const* src, int sources, std::size_t at,
                           Finisher finish) {
  constexpr int kVectors = kUnits * E::kParts;
  typename E::V value[kVectors], operand[E::kParts];
  const char* first = static_cast<const char*>(src[0]) + at;
#pragma GCC unroll 8
  for (int u = 0; u < kUnits; ++u) E::load(first + u * E::kBytes, value + u * E::kParts);
#pragma GCC unroll 1
  for (int s = 1; s < sources; ++s) {
    const char* next = static_cast<const char*>(src[s]) + at;
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const int part = v % E::kParts;
      if (part == 0) E::load(next + v / E::kParts * E::kBytes, operand);
      value[v] = Op::template apply<E>(value[v], operand[part]);
    }
  }
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) value[v] = finished<E>(value[v], finish);
#pragma GCC unroll 8
  for (int u = 0; u < kUnits; ++u) E::store(dst + at + u * E::kBytes, value + u * E::kParts);
}

template <class E, class Op, class Finisher>
void reduce_range(char* dst, const void* const* src, int sources, std::size_t begin,
                  std::size_t end, Finisher finish) {
  constexpr int kUnits = 4 / E::kParts;
  std::size_t at = begin;
  for (; end - at >= kUnits * E::kBytes; at += kUnits * E::kBytes) {
    reduce_step<E, Op, kUnits>(dst, src, sources, at, finish);
  }
  for (; end - at >= E::kBytes; at += E::kBytes) {
    reduce_step<E, Op, 1>(dst, src, sources, at, finish);
  }
  if (at == end) return;
  // The rest goes through a buffer of one unit, so that it goes through exactly the same
  // arithmetic.
  char buffer[E::kBytes] = {};
  typename E::V value[E::kParts], operand[E::kParts];
  __builtin_memcpy(buffer, static_cast<const char*>(src[0]) + at, end - at);
  E::load(buffer, value);
  for (int s = 1; s < sources; ++s) {
    __builtin_memcpy(buffer, static_cast<const char*>(src[s]) + at, end - at);
    E::load(buffer, operand);
    for (int p = 0; p < E::kParts; ++p) value[p] = Op::template apply<E>(value[p], operand[p]);
  }
  for (int p = 0; p < E::kParts; ++p) value[p] = finished<E>(value[p], finish);
  E::store(buffer, value);
  __builtin_memcpy(dst + at, buffer, end - at);
}

template <class E, class Op>
void reduce(void* dst, const void* const* src, int sources, std::size_t count, Finish finish) {
  const bool identity = E::kBool || (finish.multiply == 1.0 && finish.divide == 1.0);
  const std::size_t bytes = count * E::kSize;
  char* const to = static_cast<char*>(dst);
  if (identity && sources == 1 && !E::kBool) {
    if (dst != src[0] && bytes != 0) __builtin_memcpy(dst, src[0], bytes);
  } else if (identity) {
    reduce_range<E, Op>(to, src, sources, 0, bytes, NoFinish{});
  } else if constexpr (E::kFloating) {
    using S = typename E::Scalar;
    const S multiply = static_cast<S>(finish.multiply);
    const S divide = static_cast<S>(finish.divide);
    if (has_exact_reciprocal(divide)) {
      reduce_range<E, Op>(to, src, sources, 0, bytes, MultiplyTwice<S>{multiply, 1 / divide});
    } else {
      reduce_range<E, Op>(to, src, sources, 0, bytes, MultiplyDivide<S>{multiply, divide});
    }
  } else if constexpr (!E::kBool) {
    // Finishing integers is scalar work: a separate pass, while the block is in the L1 cache.
    constexpr std::size_t kBlock = 8192;
    for (std::size_t at = 0; at < bytes;) {
      const std::size_t end = bytes - at > kBlock ? at + kBlock : bytes;
      reduce_range<E, Op>(to, src, sources, at, end, NoFinish{});
      finish_integers<typename E::Scalar>(to + at, to + at, (end - at) / E::kSize, finish);
      at = end;
    }
  }
}

template <class E>
void scale(void* dst, const void* src, std::size_t count, Finish finish) {
  if (E::kBool || (finish.multiply == 1.0 && finish.divide == 1.0)) {
    if (dst != src && count != 0) __builtin_memcpy(dst, src, count * E::kSize);
  } else if constexpr (E::kFloating) {
    reduce<E, Sum>(dst, &src, 1, count, finish);
  } else if constexpr (!E::kBool) {
    finish_integers<typename E::Scalar>(static_cast<char*>(dst), static_cast<const char*>(src),
                                        count, finish);
  }
}

// The table.

template <class E>
constexpr void add_element(KernelTable& table) {
  constexpr int kColumn = static_cast<int>(E::kDType);
  constexpr DTypeFamily kFamily = dtype_family(E::kDType);
  table.reduce[static_cast<int>(ReduceOp::kAverage)][kColumn] = reduce<E, Sum>;
  table.reduce[static_cast<int>(ReduceOp::kSum)][kColumn] = reduce<E, Sum>;
  table.reduce[static_cast<int>(ReduceOp::kProduct)][kColumn] = reduce<E, Product>;
  if constexpr (!E::kComplex) {
    table.reduce[static_cast<int>(ReduceOp::kMin)][kColumn] = reduce<E, Min>;
    table.reduce[static_cast<int>(ReduceOp::kMax)][kColumn] = reduce<E, Max>;
  }
  table.scale[kColumn] = scale<E>;
  if constexpr (kFamily == DTypeFamily::kFloat) {
    table.dots[kColumn] = dots<typename E::Scalar>;
    table.blend[kColumn] = blend<typename E::Scalar>;
  } else if constexpr (kFamily == DTypeFamily::kHalf) {
    table.from_float32[kColumn] = E::kFromFloat32;
    table.to_float32[kColumn] = E::kToFloat32;
    table.dots[kColumn] = half_dots<E::kToFloat32>;
    table.blend[kColumn] = half_blend<E::kToFloat32>;
  } else if constexpr (kFamily == DTypeFamily::kFloat8 || kFamily == DTypeFamily::kFloat8Finite) {
    table.from_float32[kColumn] = E::from_float32;
    table.to_float32[kColumn] = E::to_float32;
  }
}

constexpr void add_wire_format(KernelTable& table, const WireFormat& format) {
  WireKernels& kernels = table.wire[index_of(format)];
  if (format.code == kInt8Blocks) {
    kernels.encode = encode_int8;
    kernels.decode = decode_int8;
    kernels.reduce[static_cast<int>(ReduceOp::kSum)] = sum_int8;
    kernels.reduce[static_cast<int>(ReduceOp::kAverage)] = sum_int8;
    return;
  }
  // A conversion to another dtype.
  const auto dtype = static_cast<int>(format.dtype);
  kernels.encode = table.from_float32[dtype];
  kernels.decode = table.to_float32[dtype];
  for (int op = 0; op < kReduceOpCount; ++op) kernels.reduce[op] = table.reduce[op][dtype];
}

constexpr KernelTable make_table(const char* name) {
  KernelTable table{};
  table.name = name;
  table.copy = copy;
  table.copy_repeated = copy_repeated;
  table.stream = stream;
#define HP_DTYPE(code, NAME, Name, name, bytes, family, c_type, mantissa, ...) \
  add_element<family##Element<DType::k##Name, c_type, mantissa>>(table);
#include "horoplug/dtypes.def"
  for (const WireFormat& format : kWireFormats) add_wire_format(table, format);
  return table;
}

}  // namespace
}  // namespace horoplug
