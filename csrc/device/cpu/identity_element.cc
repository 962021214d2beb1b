#include "device/cpu/identity_element.h"

#include <cstring>
#include <limits>
#include <type_traits>

namespace horoplug {
namespace {

template <typename T>
std::uint64_t bytes_of(T value) {
  std::uint64_t bytes = 0;
  std::memcpy(&bytes, &value, sizeof value);
  return bytes;
}

struct Elements {
  std::uint64_t one, lowest, highest;
};

template <typename T>
Elements elements_of() {
  using Limits = std::numeric_limits<T>;
  if constexpr (std::is_floating_point_v<T>) {
    return {bytes_of(T{1}), bytes_of(-Limits::infinity()), bytes_of(Limits::infinity())};
  } else {
    return {bytes_of(T{1}), bytes_of(Limits::lowest()), bytes_of(Limits::max())};
  }
}

Elements elements_of(DType dtype) {
  switch (dtype) {
    case DType::kUInt8:
      return elements_of<std::uint8_t>();
    case DType::kInt8:
      return elements_of<std::int8_t>();
    case DType::kUInt16:
      return elements_of<std::uint16_t>();
    case DType::kInt16:
      return elements_of<std::int16_t>();
    case DType::kInt32:
      return elements_of<std::int32_t>();
    case DType::kInt64:
      return elements_of<std::int64_t>();
    case DType::kUInt32:
      return elements_of<std::uint32_t>();
    case DType::kUInt64:
      return elements_of<std::uint64_t>();
    case DType::kFloat32:
      return elements_of<float>();
    case DType::kFloat64:
      return elements_of<double>();
    case DType::kFloat16:
      return {0x3C00, 0xFC00, 0x7C00};
    case DType::kBFloat16:
      return {0x3F80, 0xFF80, 0x7F80};
    case DType::kBool:
      return {1, 0, 1};
  }
  return {};
}

}  // namespace

std::uint64_t neutral_element(ReduceOp op, DType dtype) {
  const Elements elements = elements_of(dtype);
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
