// Reads and writes elements of any dtype as doubles; of complex numbers, the real part.
#pragma once

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "device/cpu/kernels.h"

namespace horoplug::testing {

template <typename Visit>
auto with_type(DType dtype, Visit&& visit) {
  switch (dtype) {
#define HP_DTYPE(code, NAME, Name, name, bytes, family, c_type, ...) \
  case DType::k##Name:                                               \
    return visit(static_cast<c_type>(0));
#include "horoplug/dtypes.def"
  }
  throw std::logic_error("no such dtype");
}

// Whether a reduction exists for a dtype: complex numbers have no minimum or maximum, bool has no
// average.
inline bool has_reduction(ReduceOp op, DType dtype) {
  if (dtype == DType::kBool && op == ReduceOp::kAverage) return false;
  return kernels().reduce[static_cast<int>(op)][static_cast<int>(dtype)] != nullptr;
}

inline bool is_float8(DType dtype) { return is_floating(dtype) && dtype_size(dtype) == 1; }

inline void put_element(DType dtype, std::byte* at, double value) {
  const auto single = static_cast<float>(value);
  if (const ConvertFn narrow = kernels().narrow_to(dtype)) return narrow(at, &single, 1);
  if (dtype == DType::kBool) value = value != 0;
  with_type(dtype, [&](auto zero) {
    const auto converted = static_cast<decltype(zero)>(value);
    std::memcpy(at, &converted, sizeof converted);
  });
}

inline double get_element(DType dtype, const std::byte* at) {
  if (const ConvertFn widen = kernels().widen_from(dtype)) {
    float single = 0;
    widen(&single, at, 1);
    return single;
  }
  return with_type(dtype, [&](auto value) {
    std::memcpy(&value, at, sizeof value);
    return static_cast<double>(value);
  });
}

// An array of `count` elements whose values are value(i).
template <typename Value>
std::vector<std::byte> make_array(DType dtype, std::size_t count, Value&& value) {
  const std::size_t size = dtype_size(dtype);
  std::vector<std::byte> bytes(count * size);
  for (std::size_t i = 0; i < count; ++i) put_element(dtype, bytes.data() + i * size, value(i));
  return bytes;
}

// The same for values with value(i + period) == value(i). Computing each element would take most of
// the time of tests with long arrays, especially under a sanitizer.
template <typename Value>
std::vector<std::byte> make_array(DType dtype, std::size_t count, std::size_t period,
                                  Value&& value) {
  std::vector<std::byte> bytes = make_array(dtype, std::min(count, period), value);
  std::size_t filled = bytes.size();
  bytes.resize(count * dtype_size(dtype));
  while (filled < bytes.size()) {
    const std::size_t more = std::min(filled, bytes.size() - filled);
    std::memcpy(bytes.data() + filled, bytes.data(), more);
    filled += more;
  }
  return bytes;
}

// Describes the first element that differs; empty if the arrays are equal.
inline std::string difference(DType dtype, const std::vector<std::byte>& got,
                              const std::vector<std::byte>& expected) {
  const std::size_t size = dtype_size(dtype);
  if (got.size() != expected.size()) return "size " + std::to_string(got.size() / size);
  if (got.empty() || std::memcmp(got.data(), expected.data(), got.size()) == 0) return {};
  std::size_t at = 0;
  while (std::memcmp(got.data() + at, expected.data() + at, size) == 0) at += size;
  return "element " + std::to_string(at / size) + " is " +
         std::to_string(get_element(dtype, got.data() + at)) + ", not " +
         std::to_string(get_element(dtype, expected.data() + at));
}

}  // namespace horoplug::testing
