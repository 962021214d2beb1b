// What the processor and the operating system offer, on x86-64.
#pragma once

namespace horoplug {

struct X86Features {
  bool avx2 = false;    // with F16C
  bool avx512 = false;  // F, BW, VL and DQ
  bool fast_strings = false;
};

// Not __builtin_cpu_supports(): it needs variables of libgcc, which the compiler of the wheels does
// not have.
X86Features x86_features();

}  // namespace horoplug
