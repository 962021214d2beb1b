#if defined(__x86_64__)
#include "device/cpu/x86_features.h"

#include <cpuid.h>

#include <cstdint>

namespace horoplug {
namespace {

struct Registers {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

// Zeros for a leaf that the processor does not have.
Registers cpuid(unsigned leaf) {
  Registers found;
  __get_cpuid_count(leaf, 0, &found.eax, &found.ebx, &found.ecx, &found.edx);
  return found;
}

bool has_all(std::uint64_t found, std::uint64_t wanted) { return (found & wanted) == wanted; }

// The registers that the operating system saves when it changes threads (XCR0).
std::uint64_t saved_registers() {
  std::uint32_t low = 0;
  std::uint32_t high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return std::uint64_t{high} << 32 | low;
}

}  // namespace

// For the bits, see Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2 (CPUID),
// and volume 1, section 13.3 (XCR0).
X86Features x86_features() {
  constexpr unsigned kOsxsave = 1U << 27;
  constexpr unsigned kF16c = 1U << 29;
  constexpr unsigned kErms = 1U << 9;
  constexpr unsigned kAvx2 = 1U << 5;
  constexpr unsigned kAvx512 = 1U << 16 | 1U << 17 | 1U << 30 | 1U << 31;  // F, DQ, BW, VL
  constexpr std::uint64_t kYmm = 0x06;                                     // XMM and YMM
  constexpr std::uint64_t kZmm = 0xe6;                                     // these, masks and ZMM
  const Registers basic = cpuid(1);
  const Registers extended = cpuid(7);
  X86Features features;
  features.fast_strings = has_all(extended.ebx, kErms);
  if (!has_all(basic.ecx, kOsxsave)) return features;
  const std::uint64_t saved = saved_registers();
  features.avx2 = has_all(saved, kYmm) && has_all(basic.ecx, kF16c) && has_all(extended.ebx, kAvx2);
  features.avx512 = features.avx2 && has_all(saved, kZmm) && has_all(extended.ebx, kAvx512);
  return features;
}

}  // namespace horoplug
#endif
