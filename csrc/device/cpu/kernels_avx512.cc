// The kernels for AVX-512 F, BW, VL and DQ.
// sources.cmake has the compiler flags.
#if defined(__x86_64__)
#include "device/cpu/kernels_impl.h"

namespace horoplug {

extern const KernelTable kAvx512Kernels;
constinit const KernelTable kAvx512Kernels = make_table("avx512");

}  // namespace horoplug
#endif
