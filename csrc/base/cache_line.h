#pragma once

#include <cstddef>

namespace horoplug {

// Bytes that processors move between memory and their caches at once. Data that different ranks
// write lies on different cache lines.
inline constexpr std::size_t kCacheLine = 64;

}  // namespace horoplug
