// Divides a buffer into one part per rank, and a part into chunks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace horoplug {

struct Part {
  std::size_t begin = 0;  // bytes
  std::size_t bytes = 0;
};

// Part number `index` of `bytes` bytes that are divided into `parts` nearly equal parts, whose
// borders are multiples of `grain`. The last part takes the remainder.
inline Part even_part(std::size_t bytes, int parts, std::size_t grain, int index) {
  const auto count = static_cast<std::size_t>(parts);
  const auto i = static_cast<std::size_t>(index);
  const std::size_t grains = (bytes + grain - 1) / grain;
  const std::size_t base = grains / count;
  const std::size_t extra = grains % count;
  const std::size_t begin = std::min((base * i + std::min(i, extra)) * grain, bytes);
  return {begin, std::min((base + (i < extra ? 1 : 0)) * grain, bytes - begin)};
}

// Rows of each rank when they are divided evenly: the first `rows % size` ranks get one row more.
inline std::vector<std::int64_t> even_rows(std::int64_t rows, int size) {
  std::vector<std::int64_t> counts(static_cast<std::size_t>(size), rows / size);
  for (std::int64_t rank = 0; rank < rows % size; ++rank) ++counts[static_cast<std::size_t>(rank)];
  return counts;
}

// All parts.
inline std::vector<Part> split_evenly(std::size_t bytes, int parts, std::size_t grain) {
  std::vector<Part> result;
  result.reserve(static_cast<std::size_t>(parts));
  for (int i = 0; i < parts; ++i) result.push_back(even_part(bytes, parts, grain, i));
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

// Chunk number `index` of a part that is divided every `chunk` bytes; empty beyond the end.
inline Part chunk_of(const Part& part, std::size_t index, std::size_t chunk) {
  const std::size_t from = std::min(index * chunk, part.bytes);
  return {part.begin + from, std::min(chunk, part.bytes - from)};
}

inline std::size_t chunk_count(std::size_t bytes, std::size_t chunk) {
  return (bytes + chunk - 1) / chunk;
}

}  // namespace horoplug
