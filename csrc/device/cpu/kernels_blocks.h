// The wire format "int8": blocks of 60 elements as 8-bit integers with a common factor, 64 bytes
// each. Compiled once per instruction set, see kernels_vector.h for the rules of such code. The
// compiler vectorises the loops, which have constant lengths and no order to keep.
//
// The factor is the largest magnitude of the block divided by 127, and NaN if an element is not
// finite: then all elements of the block are decoded as NaN.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/cpu/kernels.h"
#include "device/cpu/kernels_vector.h"

namespace horoplug {
namespace {

struct Int8Block {
  static constexpr std::size_t kElements = 60;
  float factor;
  std::int8_t values[kElements];
};
static_assert(sizeof(Int8Block) == 64);

inline void encode_block(const float* from, char* to) {
  Int8Block block;
  std::uint32_t bits[Int8Block::kElements];
  __builtin_memcpy(bits, from, sizeof bits);
  // Magnitudes are ordered as their bits are.
  std::uint32_t most = 0;
  for (const std::uint32_t some : bits) {
    const std::uint32_t magnitude = some & 0x7fffffff;
    most = magnitude > most ? magnitude : most;
  }
  const bool finite = most < 0x7f800000;
  const std::uint32_t kept = finite ? most : 0x7fc00000;
  __builtin_memcpy(&block.factor, &kept, sizeof kept);
  block.factor /= 127.0F;
  const float divisor = finite && block.factor > 0 ? block.factor : 1.0F;
  const float counts = finite && block.factor > 0 ? 1.0F : 0.0F;
  for (std::size_t i = 0; i < Int8Block::kElements; ++i) {
    // Adding a number whose unit in the last place is 1 rounds to nearest even.
    constexpr float kRounds = 0x1.8p23F;
    float value = from[i] / divisor * counts;
    value = value > 127.0F ? 127.0F : value;
    value = value > -127.0F ? value : -127.0F;
    value = value + kRounds;
    value = value - kRounds;
    block.values[i] = static_cast<std::int8_t>(static_cast<std::int32_t>(finite ? value : 0.0F));
  }
  __builtin_memcpy(to, &block, sizeof block);
}

inline void decode_block(const char* from, float* to) {
  Int8Block block;
  __builtin_memcpy(&block, from, sizeof block);
  for (std::size_t i = 0; i < Int8Block::kElements; ++i) {
    to[i] = block.factor * static_cast<float>(block.values[i]);
  }
}

inline void encode_int8(void* dst, const void* src, std::size_t count) {
  char* to = static_cast<char*>(dst);
  const char* from = static_cast<const char*>(src);
  for (std::size_t left = count; left > 0; to += sizeof(Int8Block)) {
    const std::size_t some = left < Int8Block::kElements ? left : Int8Block::kElements;
    float values[Int8Block::kElements] = {};
    __builtin_memcpy(values, from, some * sizeof(float));
    encode_block(values, to);
    from += some * sizeof(float);
    left -= some;
  }
}

inline void decode_int8(void* dst, const void* src, std::size_t count) {
  char* to = static_cast<char*>(dst);
  const char* from = static_cast<const char*>(src);
  for (std::size_t left = count; left > 0; from += sizeof(Int8Block)) {
    const std::size_t some = left < Int8Block::kElements ? left : Int8Block::kElements;
    float values[Int8Block::kElements];
    decode_block(from, values);
    __builtin_memcpy(to, values, some * sizeof(float));
    to += some * sizeof(float);
    left -= some;
  }
}

// `count` blocks. Sums of float32, in the order of the sources.
inline void sum_int8(void* dst, const void* const* src, int sources, std::size_t count,
                     Finish finish) {
  const auto multiply = static_cast<float>(finish.multiply);
  const auto divide = static_cast<float>(finish.divide);
  for (std::size_t at = 0; at < count * sizeof(Int8Block); at += sizeof(Int8Block)) {
    float sum[Int8Block::kElements], operand[Int8Block::kElements];
    decode_block(static_cast<const char*>(src[0]) + at, sum);
    for (int s = 1; s < sources; ++s) {
      decode_block(static_cast<const char*>(src[s]) + at, operand);
      for (std::size_t i = 0; i < Int8Block::kElements; ++i) sum[i] += operand[i];
    }
    for (float& value : sum) value = value * multiply / divide;
    encode_block(sum, static_cast<char*>(dst) + at);
  }
}

}  // namespace
}  // namespace horoplug
