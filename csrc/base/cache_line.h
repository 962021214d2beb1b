#pragma once

#include <cstddef>

namespace horoplug {

// Bytes that processors move between memory and their caches at once. Data that different ranks
// write lies on different cache lines.
inline constexpr std::size_t kCacheLine = 64;

// Bytes rounded to whole cache lines.
constexpr std::size_t round_down_to_lines(std::size_t bytes) {
  return bytes / kCacheLine * kCacheLine;
}
constexpr std::size_t round_up_to_lines(std::size_t bytes) {
  return round_down_to_lines(bytes + kCacheLine - 1);
}

}  // namespace horoplug
