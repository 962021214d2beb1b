// Arrays of random elements, including special values, for tests of kernels.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

#include "tests/harness/kernels_reference.h"

namespace horoplug::testing {

// The random seed of this run; HOROPLUG_TEST_SEED sets it, to repeat a failed run.
inline unsigned seed() {
  static const unsigned value = [] {
    const char* text = std::getenv("HOROPLUG_TEST_SEED");
    return text ? static_cast<unsigned>(std::strtoul(text, nullptr, 10)) : std::random_device{}();
  }();
  return value;
}
template <class T>
void fill_numbers(void* to, std::size_t count, std::mt19937_64& random) {
  using Limits = std::numeric_limits<T>;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t r = random();
    T value;
    std::memcpy(&value, &r, sizeof(T));  // any bits: NaNs, subnormals, all magnitudes
    switch (random() % 8) {
      case 0: {
        const T special[] = {T(0),
                             T(1),
                             static_cast<T>(-T(1)),
                             Limits::max(),
                             Limits::lowest(),
                             Limits::min(),
                             static_cast<T>(-T(0)),
                             Limits::infinity(),
                             static_cast<T>(-Limits::infinity()),
                             Limits::quiet_NaN(),
                             Limits::denorm_min()};
        value = special[random() % std::size(special)];
        break;
      }
      case 1:
      case 2:
      case 3:
      case 4:
        // Small values, whose results depend on correct rounding.
        value = static_cast<T>(static_cast<int>(random() % 201) - 100);
        if constexpr (std::is_floating_point_v<T>) value /= 7;
        break;
      default:
        break;
    }
    reference::store(to, i, value);
  }
}

inline void fill(DType dtype, void* to, std::size_t count, std::mt19937_64& random) {
  reference::with_element(dtype, [&](auto element) {
    using E = decltype(element);
    if constexpr (std::is_same_v<E, reference::Bool>) {
      for (std::size_t i = 0; i < count; ++i) {
        const std::uint64_t r = random();
        static_cast<unsigned char*>(to)[i] = static_cast<unsigned char>(r & 1 ? r >> 8 : 0);
      }
    } else if constexpr (reference::kIsComplex<typename E::Value>) {
      fill_numbers<typename E::Value::value_type>(to, 2 * count, random);
    } else if (kernels().narrow_to(dtype) == nullptr) {
      fill_numbers<typename E::Value>(to, count, random);
    } else if constexpr (std::is_same_v<typename E::Value, float>) {
      // A float format with fewer bits: every fourth element has random bits.
      std::vector<float> values(count);
      fill_numbers<float>(values.data(), count, random);
      const std::size_t size = dtype_size(dtype);
      for (std::size_t i = 0; i < count; ++i) {
        const std::uint64_t r = random(), bits = r >> 16;
        E::put(to, i, values[i]);
        if (r % 4 == 0) std::memcpy(static_cast<char*>(to) + i * size, &bits, size);
      }
    }
  });
}

}  // namespace horoplug::testing
