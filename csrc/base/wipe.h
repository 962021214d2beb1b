// Clears memory that held a secret.
#pragma once

#include <array>
#include <cstring>

namespace horoplug {

// The compiler may not drop this, although nothing reads the memory afterwards. explicit_bzero()
// does the same, but only glibc 2.25 and newer have it, and the wheels are for older ones, too.
template <class T, std::size_t kCount>
void wipe(std::array<T, kCount>& secret) {
  std::memset(secret.data(), 0, sizeof secret);
  asm volatile("" : : "r"(secret.data()) : "memory");
}

}  // namespace horoplug
