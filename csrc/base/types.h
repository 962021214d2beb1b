// Element types, reduction operators and kinds of operations, which every layer shares.
#pragma once

#include <cstddef>
#include <cstdint>

#include "horoplug/horoplug.h"

namespace horoplug {

enum class DType : std::uint8_t {
#define HP_DTYPE(code, NAME, Name, ...) k##Name = HP_##NAME,
#include "horoplug/dtypes.def"
};
inline constexpr int kDTypeCount = HP_DTYPE_COUNT;

// What kind of arithmetic an element type has; a column of dtypes.def.
enum class DTypeFamily : std::uint8_t {
  kUnsigned,
  kSigned,
  kBool,
  kFloat,
  kHalf,
  kFloat8,
  kFloat8Finite,
  kComplex,
};

enum class ReduceOp : std::uint8_t {
  kAverage = HP_AVERAGE,
  kSum = HP_SUM,
  kAdasum = HP_ADASUM,
  kMin = HP_MIN,
  kMax = HP_MAX,
  kProduct = HP_PRODUCT,
};
inline constexpr int kReduceOpCount = HP_REDUCE_OP_COUNT;

enum class OpKind : std::uint8_t {
#define HP_OPERATION(code, NAME, Name, ...) k##Name = HP_##NAME,
#include "horoplug/operations.def"
};
inline constexpr int kOpKindCount = HP_OP_COUNT;

std::size_t dtype_size(DType dtype);
const char* dtype_name(DType dtype);
const char* reduce_op_name(ReduceOp op);

inline constexpr DTypeFamily kDTypeFamilies[] = {
#define HP_DTYPE(code, NAME, Name, name, bytes, family, ...) DTypeFamily::k##family,
#include "horoplug/dtypes.def"
};
constexpr DTypeFamily dtype_family(DType dtype) { return kDTypeFamilies[static_cast<int>(dtype)]; }

// Floats of one real number.
constexpr bool is_floating(DType dtype) {
  const DTypeFamily family = dtype_family(dtype);
  return family == DTypeFamily::kFloat || family == DTypeFamily::kHalf ||
         family == DTypeFamily::kFloat8 || family == DTypeFamily::kFloat8Finite;
}

constexpr bool is_complex(DType dtype) { return dtype_family(dtype) == DTypeFamily::kComplex; }

// The 16-bit floats, which float32 is compressed to.
constexpr bool is_half(DType dtype) { return dtype_family(dtype) == DTypeFamily::kHalf; }

// Whether Adasum works on it.
constexpr bool has_adasum(DType dtype) {
  return dtype_family(dtype) == DTypeFamily::kFloat || is_half(dtype);
}

}  // namespace horoplug
