// Chooses among the kernel tables by what the processor can do.
#include "device/cpu/kernels.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "device/cpu/x86_features.h"

namespace horoplug {

extern const KernelTable kBaselineKernels;
#if defined(__x86_64__)
extern const KernelTable kAvx2Kernels;
extern const KernelTable kAvx512Kernels;
#endif

namespace {

// Sanitizers do not see what string instructions read and write.
bool has_fast_strings() {
#if defined(__x86_64__) && !defined(HOROPLUG_TSAN) && !defined(HOROPLUG_ASAN)
  return x86_features().fast_strings;
#else
  return false;
#endif
}

}  // namespace

KernelTables available_kernels() {
  KernelTables found{};
#if defined(__x86_64__)
  const X86Features features = x86_features();
  if (features.avx512) found.tables[found.count++] = &kAvx512Kernels;
  if (features.avx2) found.tables[found.count++] = &kAvx2Kernels;
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
