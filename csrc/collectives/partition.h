// How a buffer is cut into one part per rank, and a part into chunks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

namespace horoplug {

struct Part {
  std::size_t begin = 0;  // bytes
  std::size_t bytes = 0;
};

// Cuts `bytes` into `parts` nearly equal parts whose borders are multiples of `grain` (the last one
// takes the rest).
inline std::vector<Part> split_evenly(std::size_t bytes, int parts, std::size_t grain) {
  const std::size_t grains = (bytes + grain - 1) / grain;
  std::vector<Part> result(static_cast<std::size_t>(parts));
  const std::size_t base = grains / result.size();
  const std::size_t extra = grains % result.size();
  std::size_t at = 0;
  for (std::size_t i = 0; i < result.size(); ++i) {
    const std::size_t size = std::min((base + (i < extra ? 1 : 0)) * grain, bytes - at);
    result[i] = {at, size};
    at += size;
  }
  return result;
}

// Parts of given sizes, one after the other.
inline std::vector<Part> consecutive(std::span<const std::size_t> sizes) {
  std::vector<Part> result;
  result.reserve(sizes.size());
  std::size_t at = 0;
  for (const std::size_t size : sizes) {
    result.push_back({at, size});
    at += size;
  }
  return result;
}

// Piece number `index` of a part that is cut every `chunk` bytes; empty beyond its end.
inline Part chunk_of(const Part& part, std::size_t index, std::size_t chunk) {
  const std::size_t from = std::min(index * chunk, part.bytes);
  return {part.begin + from, std::min(chunk, part.bytes - from)};
}

inline std::size_t chunk_count(std::size_t bytes, std::size_t chunk) {
  return (bytes + chunk - 1) / chunk;
}

}  // namespace horoplug
