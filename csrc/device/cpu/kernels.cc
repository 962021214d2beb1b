// Chooses among the kernel tables by what the processor can do.
#include "device/cpu/kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace horoplug {

extern const KernelTable kBaselineKernels;
#if defined(__x86_64__)
extern const KernelTable kAvx2Kernels;
extern const KernelTable kAvx512Kernels;
#endif

#if defined(__x86_64__)
namespace {

// Not every compiler knows this one by name.
bool has_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

// Sanitizers do not see what string instructions read and write.
bool has_fast_strings() {
#if defined(HOROPLUG_TSAN) || defined(HOROPLUG_ASAN)
  return false;
#else
  constexpr unsigned kErms = 1U << 9;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (ebx & kErms) != 0;
#endif
}

}  // namespace
#else
static bool has_fast_strings() { return false; }
#endif

KernelTables available_kernels() {
  KernelTables found{};
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && has_f16c();
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (avx2 && avx512) found.tables[found.count++] = &kAvx512Kernels;
  if (avx2) found.tables[found.count++] = &kAvx2Kernels;
#endif
  found.tables[found.count++] = &kBaselineKernels;
  return found;
}

namespace {

const KernelTable& choose() {
  const KernelTables available = available_kernels();
  const char* wanted = std::getenv("HOROPLUG_CPU_KERNELS");
  if (wanted == nullptr || *wanted == '\0') return *available.tables[0];
  for (int i = 0; i < available.count; ++i) {
    if (std::strcmp(available.tables[i]->name, wanted) == 0) return *available.tables[i];
  }
  std::fprintf(stderr, "horoplug: HOROPLUG_CPU_KERNELS=%s: not available here, using %s\n", wanted,
               available.tables[0]->name);
  return *available.tables[0];
}

}  // namespace

const KernelTable& kernels() {
  static const KernelTable chosen = [] {
    KernelTable table = choose();
    if (has_fast_strings()) table.copy = table.copy_repeated;
    return table;
  }();
  return chosen;
}

}  // namespace horoplug
