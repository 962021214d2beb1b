// A hash after FNV-1a, for comparing values that should be equal. It detects mistakes, not malice.
// Numbers enter as a whole, and texts byte by byte.
#pragma once

#include <cstdint>
#include <string_view>

namespace horoplug {

class Hash {
 public:
  // Adds a text and its length.
  Hash& add(std::string_view text) {
    for (const char c : text) step(static_cast<unsigned char>(c));
    step(0);
    return *this;
  }
  Hash& add(std::uint64_t value) {
    step(value);
    hash_ ^= hash_ >> 32;  // FNV never carries high bits to low ones
    return *this;
  }
  // Never 0: 0 stands for "not known".
  std::uint64_t value() const { return hash_ == 0 ? 1 : hash_; }

 private:
  void step(std::uint64_t part) { hash_ = (hash_ ^ part) * 0x100000001B3; }
  std::uint64_t hash_ = 0xCBF29CE484222325;
};

}  // namespace horoplug
