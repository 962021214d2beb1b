// The kernels for AVX2 and F16C.
// sources.cmake has the compiler flags.
#if defined(__x86_64__)
#include "device/cpu/kernels_impl.h"

namespace horoplug {

extern const KernelTable kAvx2Kernels;
constinit const KernelTable kAvx2Kernels = make_table("avx2");

}  // namespace horoplug
#endif
