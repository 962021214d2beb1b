// FNV-1a hash, for comparing values that should be equal. It detects mistakes, not malice.
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
    for (int i = 0; i < 8; ++i) step(static_cast<unsigned char>(value >> (8 * i)));
    return *this;
  }
  // Never 0: 0 stands for "not known".
  std::uint64_t value() const { return hash_ == 0 ? 1 : hash_; }

 private:
  void step(unsigned char byte) { hash_ = (hash_ ^ byte) * 0x100000001B3; }
  std::uint64_t hash_ = 0xCBF29CE484222325;
};

}  // namespace horoplug
