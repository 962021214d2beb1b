#include "device/cpu/identity_element.h"

namespace horoplug {
namespace {

struct Elements {
  std::uint64_t one, lowest, highest;  // as bits
};

// `mantissa`: stored bits of a float's significand.
constexpr Elements elements_of(DTypeFamily family, int bytes, int mantissa) {
  const int bits = 8 * bytes;
  const std::uint64_t sign = bits > 64 ? 0 : std::uint64_t{1} << (bits - 1);
  const std::uint64_t magnitude = sign - 1;
  switch (family) {
    case DTypeFamily::kUnsigned:
      return {1, 0, sign | magnitude};
    case DTypeFamily::kSigned:
      return {1, sign, magnitude};
    case DTypeFamily::kBool:
      return {1, 0, 1};
    case DTypeFamily::kComplex:  // the real part comes first; there is no order
      return {elements_of(DTypeFamily::kFloat, bytes / 2, mantissa).one, 0, 0};
    case DTypeFamily::kFloat:
    case DTypeFamily::kHalf:
    case DTypeFamily::kFloat8:
    case DTypeFamily::kFloat8Finite:
      break;
  }
  // The exponent of 1 is the bias; that of infinity has all bits set.
  const std::uint64_t fraction = (std::uint64_t{1} << mantissa) - 1;
  const std::uint64_t infinity = magnitude & ~fraction;
  const std::uint64_t one = infinity / 2 & ~fraction;
  const std::uint64_t highest =
      family == DTypeFamily::kFloat8Finite ? magnitude - 1 : infinity;  // all bits set: NaN
  return {one, sign | highest, highest};
}

constexpr Elements kElements[] = {
#define HP_DTYPE(code, NAME, Name, name, bytes, family, c_type, mantissa, ...) \
  elements_of(DTypeFamily::k##family, bytes, mantissa),
#include "horoplug/dtypes.def"
};

}  // namespace

std::uint64_t identity_element(ReduceOp op, DType dtype) {
  const Elements& elements = kElements[static_cast<int>(dtype)];
  switch (op) {
    case ReduceOp::kProduct:
      return elements.one;
    case ReduceOp::kMin:
      return elements.highest;
    case ReduceOp::kMax:
      return elements.lowest;
    case ReduceOp::kAverage:
    case ReduceOp::kSum:
    case ReduceOp::kAdasum:
      break;
  }
  return 0;
}

}  // namespace horoplug
