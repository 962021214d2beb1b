// The kernels for the instructions that every processor of the architecture has (x86-64: SSE2).
#include "device/cpu/kernels_impl.h"

namespace horoplug {

extern const KernelTable kBaselineKernels;
constinit const KernelTable kBaselineKernels = make_table("baseline");

}  // namespace horoplug
